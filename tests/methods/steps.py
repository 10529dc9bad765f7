"""What tests of several methods ask of a step: is its loss the formula, and could a CUDA graph replay it?"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeel.core import state
from fedkeel.core.messages import Update
from fedkeel.core.types import Output
from fedkeel.data.federation import Federation
from fedkeel.engine.rounds import Federated
from tests.methods.small import broadcast, started
from tests.methods.together import assert_a_slot_serves_all


def global_output(run: Federated, x: Tensor) -> Output:
    """What the broadcast model gives in training mode, on a copy; all of `x` is one batch."""
    model = copy.deepcopy(run.setup.worker.model).train()
    state.load(model, run.server.weights, run.server.statistics)
    with torch.no_grad():
        output: Output = model(x)
    return output


def cross_entropy(logits: Tensor, labels: list[int]) -> float:
    rows = logits.double().softmax(1).tolist()
    return sum(-math.log(row[label]) for row, label in zip(rows, labels, strict=True)) / len(rows)


def cosine(a: list[float], b: list[float]) -> float:
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def train(run: Federated, name: str = "client0", round: int = 0) -> Update:
    return run.setup.worker.train(name, broadcast(run, round), {})[0]


def assert_descends(run: Federated, loss: Callable[[], float], rate: float = 1e-3) -> None:
    """One plain step moves a weight by minus the rate times the difference quotient of `loss` at the global model."""
    trained = train(run, round=1).weights
    for entry in ("encoder.6.weight", "encoder.6.bias"):  # scale and shift of the last batch norm
        before = run.server.weights[entry]
        moved = trained[entry] - before
        place, losses = int(moved.abs().argmax()), []
        for change in (1e-3, -1e-3):
            changed = before.clone()
            changed[place] += change
            run.server.weights = {**run.server.weights, entry: changed}
            losses.append(loss())
        run.server.weights = {**run.server.weights, entry: before}
        assert float(moved[place]) == pytest.approx(-rate * (losses[0] - losses[1]) / 2e-3, rel=0.02), entry


def rounds(run: Federated, number: int) -> dict[str, Tensor]:
    """What the server has after that many rounds."""
    try:
        for round in range(number):
            tested = run.round(round)
    finally:
        run.executor.close()
    return {**tested.weights, **tested.statistics, **run.server.extras}


def assert_executors_agree(method: str, directory: Path, federation: Federation, **options: Any) -> None:
    """Three rounds under `serial` and under `processes`."""
    results = [
        rounds(started(method, directory / executor, federation, executor=executor, workers=2, **options), 3)
        for executor in ("serial", "processes")
    ]
    assert results[0].keys() == results[1].keys()
    for name, tensor in results[0].items():
        torch.testing.assert_close(results[1][name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def assert_replayable(run: Federated, round: int) -> None:
    """Clients can share a slot of the executor `cuda`, whose graphs were captured for the first of them."""
    worker = run.setup.worker
    assert_a_slot_serves_all(worker, broadcast(run, round), {client.name: {} for client in run.federation.clients})
