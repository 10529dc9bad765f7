from __future__ import annotations

import logging
import math

import pytest
import torch

from fedkeel.engine.rounds import Federated
from fedkeel.methods.fedfm import global_anchors
from tests.methods.small import CLASSES, pixels, small_federation, started
from tests.methods.steps import (
    assert_descends,
    cosine,
    cross_entropy,
    global_output,
    rounds,
    train,
)

UNEVEN = [[0, 1, 2] * 4, [0, 0, 0, 1], [0, 2, 2]]  # class 3 is nowhere, class 2 not on client1
CLIENTS = ["client0", "client1", "client2"]


def expected_anchors(run: Federated) -> dict[int, list[float]]:
    """The mean feature of each class over all clients' data together, under the global model."""
    model = run.setup.worker.model
    model.load_state_dict({**run.server.weights, **run.server.statistics})
    model.eval()
    x = torch.cat([pixels(run.federation, name) for name in CLIENTS])
    y = torch.cat([run.federation.labels[run.federation[name].train] for name in CLIENTS])
    features = model(x).features.detach().double()
    return {c: features[y == c].mean(dim=0).tolist() for c in range(CLASSES) if (y == c).any()}


def expected_loss(run: Federated, anchors: dict[int, list[float]], lambda_: float) -> float:
    """CE + lambda L_match by loops, for client0, whose data are one batch."""
    labels = run.federation.labels[run.federation["client0"].train].tolist()
    output = global_output(run, pixels(run.federation, "client0"))
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


def test_training_moves_along_the_gradient_of_that_loss(tmp_path):
    text = "fedfm(from_round=1, lambda_=2)"
    run = started(text, tmp_path, small_federation(UNEVEN), batch_size=64, learning_rate=1e-3, momentum=0.0)
    ready(run)
    anchors = expected_anchors(run)
    assert_descends(run, lambda: expected_loss(run, anchors, 2))


@pytest.mark.slow
@pytest.mark.parametrize("start", ["2", "0.5"])
@pytest.mark.parametrize("anchors", ["asked", "update"])
def test_it_matches_from_its_round_or_share_of_the_rounds_on(tmp_path, anchors, start):
    runs = {
        text: started(text, tmp_path / str(i), rounds=4)
        for i, text in enumerate(("fedavg", f"fedfm(from_round={start}, anchors={anchors})"))
    }
    same = []
    for round in range(4):
        for run in runs.values():
            run.round(round)
        left, right = (run.server.weights["encoder.0.weight"] for run in runs.values())
        same.append(torch.equal(left, right))
    assert same == [True, True, False, False]


def test_asking_is_one_exchange_in_each_round_that_matches_and_none_with_the_update(tmp_path):
    for anchors, expected in (("asked", [0, 1, 1]), ("update", [0, 0, 0])):
        run = started(f"fedfm(from_round=1, anchors={anchors})", tmp_path / anchors)
        asked = []
        for round in range(3):
            run.round(round)
            asked.append(run.traffic["questions"])
        assert asked == expected


def test_anchors_with_the_update_are_weighted_by_class_counts_and_of_the_trained_models(tmp_path):
    run = started("fedfm(from_round=1, anchors=update)", tmp_path, small_federation(UNEVEN))
    sent = [train(run, name).extras for name in CLIENTS]
    assert sent[1]["fedfm/counts"].tolist() == [3, 1, 0, 0]
    run.round(0)
    means = [tensors["fedfm/means"] for tensors in sent]
    torch.testing.assert_close(run.server.extras["fedfm/anchors"][1], (4 * means[0][1] + means[1][1]) / 5)
    torch.testing.assert_close(run.server.extras["fedfm/anchors"][2], (4 * means[0][2] + 2 * means[2][2]) / 6)


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
    assert "never will" in caplog.text


@pytest.mark.parametrize("batch_size", [8, 1])
def test_missing_classes_and_single_samples(tmp_path, batch_size):
    text = "fedfm(from_round=1)"
    after = rounds(started(text, tmp_path, small_federation(UNEVEN), batch_size=batch_size, learning_rate=0.01), 3)
    assert all(torch.isfinite(tensor).all() for tensor in after.values())
