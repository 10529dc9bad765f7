from __future__ import annotations

import logging
import math

import pytest
import torch

from fedkeel.engine.rounds import Federated
from fedkeel.methods.fedfm import global_anchors
from tests.methods.small import CLASSES, pixels, small_federation, started
from tests.methods.steps import (
    cosine,
    cross_entropy,
    global_output,
    train,
)

UNEVEN = [[0, 1, 2] * 4, [0, 0, 0, 1], [0, 2, 2]]  # class 3 is nowhere, class 2 not on client1
CLIENTS = ["client0", "client1", "client2"]


def expected_anchors(run: Federated) -> dict[int, list[float]]:
    """The mean feature of each class over all clients' data together, under the global model."""
    model = run.setup.worker.model
    model.load_state_dict({**run.server.weights, **run.server.statistics})
    model.eval()
    x = torch.cat([pixels(run.setup.federation, name) for name in CLIENTS])
    y = torch.cat([run.setup.federation.labels[run.setup.federation[name].train] for name in CLIENTS])
    features = model(x).features.detach().double()
    return {c: features[y == c].mean(dim=0).tolist() for c in range(CLASSES) if (y == c).any()}


def expected_loss(run: Federated, anchors: dict[int, list[float]], lambda_: float) -> float:
    """CE + lambda L_match by loops, for client0, whose data are one batch."""
    labels = run.setup.federation.labels[run.setup.federation["client0"].train].tolist()
    output = global_output(run, pixels(run.setup.federation, "client0"))
    terms = []
    for z, y in zip(output.features.double().tolist(), labels, strict=True):
        weights = {c: math.exp(cosine(z, anchor) / 0.1) for c, anchor in anchors.items()}
        terms.append(-math.log(weights[y] / sum(weights.values())))
    return cross_entropy(output.logits, labels) + lambda_ * sum(terms) / len(terms)


def ready(run: Federated) -> None:
    """As `Federated.round` begins: the anchors of round 1 are asked for."""
    run.round(0)
    run.server.round = 1
    run.method.before_training(run.server)


def test_anchors_are_the_class_means_of_all_data_under_the_aggregated_model(tmp_path):
    run = started("fedfm(from_round=1)", tmp_path, small_federation(UNEVEN))
    ready(run)
    expected = expected_anchors(run)
    assert run.server.extras["fedfm/present"].tolist() == [True, True, True, False]
    for c, anchor in expected.items():
        assert run.server.extras["fedfm/anchors"][c].tolist() == pytest.approx(anchor, rel=1e-4, abs=1e-6)


def test_the_loss_of_a_real_step_is_that_of_the_paper(tmp_path):
    run = started("fedfm(from_round=1)", tmp_path, small_federation(UNEVEN), batch_size=64)
    ready(run)
    wanted = expected_loss(run, expected_anchors(run), 50)
    assert wanted - expected_loss(run, expected_anchors(run), 0) > 0.1
    assert train(run, round=1).metrics["loss"] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["2", "0.5"])
def test_it_matches_from_its_round_or_share_of_the_rounds_on(tmp_path, start):
    runs = {
        text: started(text, tmp_path / str(i), rounds=4)
        for i, text in enumerate(("fedavg", f"fedfm(from_round={start})"))
    }
    same = []
    for round in range(4):
        for run in runs.values():
            run.round(round)
        left, right = (run.server.weights["encoder.0.weight"] for run in runs.values())
        same.append(torch.equal(left, right))
    assert same == [True, True, False, False]


def test_an_anchor_stays_where_a_class_is_missing():
    last = {"anchors": torch.tensor([[4.0], [7.0], [0.0]]), "present": torch.tensor([True, True, False])}
    sent = [
        {"means": torch.tensor([[1.0], [0.0], [2.0]]), "counts": torch.tensor([1.0, 0.0, 5.0])},
        {"means": torch.tensor([[-1.0], [0.0], [0.0]]), "counts": torch.tensor([1.0, 0.0, 0.0])},
    ]
    new = global_anchors(sent, last)
    assert new["anchors"].tolist() == [[0.0], [7.0], [2.0]]
    assert new["present"].all()
    assert global_anchors([], last) is last


def test_a_run_that_ends_before_it_matches_is_told_so(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="fedkeel"):
        started("fedfm", tmp_path, rounds=20).round(0)
    assert "ends before 'fedfm' matches" in caplog.text
