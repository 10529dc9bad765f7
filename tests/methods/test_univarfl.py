from __future__ import annotations

import copy
import math

import pytest
import torch

from fedkeel.core import state
from fedkeel.engine.rounds import Federated
from tests.methods.small import CLASSES, broadcast, small_federation, started


def expected_loss(run: Federated, name: str, lambda_: float, mu: float, eps: float) -> float:
    """Eqs. 1-4 by loops, on a copy of the broadcast model; all of the client's data are one batch."""
    worker, server = run.setup.worker, run.server
    model = copy.deepcopy(worker.model).train()
    state.load(model, server.weights, server.statistics)
    indices = run.setup.federation[name].train
    with torch.no_grad():
        output = model(run.setup.federation.images[indices].float() / 255)
    p, z = output.logits.double().softmax(1).tolist(), output.features.double().tolist()
    labels, n = run.setup.federation.labels[indices].tolist(), len(p)
    entropy = sum(-math.log(row[label]) for row, label in zip(p, labels, strict=True)) / n

    identity = [[float(i == j) for j in range(CLASSES)] for i in range(CLASSES)]

    def variance(column: list[float]) -> float:
        mean = sum(column) / len(column)
        return sum((value - mean) ** 2 for value in column) / (len(column) - 1)

    c = sum(variance([row[j] for row in identity]) for j in range(CLASSES)) / CLASSES
    spread = sum(max(0.0, c - variance([row[j] for row in p])) for j in range(CLASSES)) / CLASSES

    def cosine(a: list[float], b: list[float]) -> float:
        dot = sum(x * y for x, y in zip(a, b, strict=True))
        return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))

    energy = sum(1 / (1 - min(cosine(a, b), 1) + eps) for a in z for b in z) / n**2
    return entropy + mu * energy + lambda_ * spread


@pytest.mark.parametrize(
    ("options", "lambda_", "mu", "eps"),
    [("", CLASSES / 4, 0.5, 1e-2), ("lambda_=3, mu=0", 3, 0, 1e-2), ("lambda_=0, mu=2, eps=0.1", 0, 2, 0.1)],
)
def test_the_loss_of_a_real_step_is_that_of_equation_4(tmp_path, options, lambda_, mu, eps):
    federation = small_federation(([0, 0, 0, 1] * 4, [2, 3] * 6))  # clients that lack classes
    run = started(f"univarfl({options})", tmp_path, federation=federation, batch_size=64)
    for round in range(2):  # from the first round on
        update, _ = run.setup.worker.train("client0", broadcast(run, round), {})
        wanted = expected_loss(run, "client0", lambda_, mu, eps)
        assert update.metrics["loss"] == pytest.approx(wanted, rel=1e-4)
        assert abs(wanted - expected_loss(run, "client0", 0, 0, eps)) > 1e-2
        run.round(round)
