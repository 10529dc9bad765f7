from __future__ import annotations

import math

import pytest
import torch

from fedkeel.core.checking import check
from fedkeel.engine.rounds import Federated
from fedkeel.formulas.prototypes import regrouped
from tests.methods.small import broadcast, pixels, small_federation, started
from tests.methods.steps import (
    cosine,
    cross_entropy,
    global_output,
    train,
)

UNEVEN = [[0, 1, 2] * 4, [0, 0, 0, 1], [0, 2, 2]]  # class 3 is nowhere, class 2 not on client1


def expected_loss(run: Federated, name: str, temperature: float) -> tuple[float, float]:
    """The cross-entropy, and CPCL + UPCR by loops; all of the client's data are one batch."""
    labels = run.setup.federation.labels[run.setup.federation[name].train].tolist()
    output = global_output(run, pixels(run.setup.federation, name))
    points = run.server.extras["fpl/prototypes"].double().tolist()
    classes = run.server.extras["fpl/classes"].tolist()
    terms = []
    for z, y in zip(output.features.double().tolist(), labels, strict=True):
        weights = [
            math.exp(cosine(z, p) / temperature) if c >= 0 else 0.0 for p, c in zip(points, classes, strict=True)
        ]
        own = [p for p, c in zip(points, classes, strict=True) if c == y]
        contrast = -math.log(sum(w for w, c in zip(weights, classes, strict=True) if c == y) / sum(weights))
        mean = [sum(values) / len(own) for values in zip(*own, strict=True)]
        terms.append(contrast + sum((a - b) ** 2 for a, b in zip(z, mean, strict=True)) / len(z))
    return cross_entropy(output.logits, labels), sum(terms) / len(terms)


@pytest.mark.parametrize("temperature", [0.02, 0.2])
def test_the_loss_of_a_real_step_is_that_of_the_paper(tmp_path, temperature):
    federation = small_federation([[0, 1, 2, 3] * 4] * 4)
    run = started(f"fpl(temperature={temperature})", tmp_path, federation, batch_size=64)
    first = train(run, round=0).metrics["loss"]
    assert first == pytest.approx(
        cross_entropy(global_output(run, pixels(federation, "client0")).logits, [0, 1, 2, 3] * 4)
    )
    run.round(0)
    entropy, terms = expected_loss(run, "client0", temperature)
    assert terms > 0.1
    assert train(run, round=1).metrics["loss"] == pytest.approx(entropy + terms, rel=1e-4)


def test_a_client_sends_class_means_of_its_trained_model(tmp_path):
    federation = small_federation(UNEVEN)
    run = started("fpl", tmp_path, federation)
    update = train(run, "client1")
    check(update, broadcast(run))
    model = run.setup.worker.model
    model.load_state_dict({**update.weights, **update.statistics})
    features = model.eval()(pixels(federation, "client1")).features.detach()
    torch.testing.assert_close(update.extras["fpl/prototypes"][0], features[:3].mean(dim=0))
    assert update.extras["fpl/present"].tolist() == [True, True, False, False]


def test_the_server_keeps_a_prototype_for_each_cluster_of_clients():
    east, north = torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.9, 0.1]]), torch.tensor([[0.1, 1.0], [0.0, 1.0]])
    sent = [(row[None], torch.tensor([2])) for row in (*east, *north)]
    points, classes = regrouped(sent)
    assert classes.tolist() == [2, 2]
    torch.testing.assert_close(points, torch.stack([east.mean(dim=0), north.mean(dim=0)]))


def test_a_class_that_no_client_of_a_round_has_keeps_its_prototypes():
    first = regrouped([(torch.eye(3), torch.tensor([0, 1, -1])), (torch.eye(3), torch.tensor([0, -1, -1]))])
    second = regrouped([(5 * torch.ones(1, 3), torch.tensor([0]))], first)
    kept = {int(c): row.tolist() for row, c in zip(*second, strict=True) if c >= 0}
    assert kept == {0: [5.0, 5.0, 5.0], 1: [0.0, 1.0, 0.0]}
