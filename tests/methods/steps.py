"""What tests of several methods ask of a step: is its loss the formula, and could a CUDA graph replay it?"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from fedkeel.core import state
from fedkeel.core.messages import Update
from fedkeel.core.types import Output
from fedkeel.engine.rounds import Federated
from tests.methods.small import broadcast


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


def rounds(run: Federated, number: int) -> dict[str, Tensor]:
    """What the server has after that many rounds."""
    try:
        for round in range(number):
            tested = run.round(round)
    finally:
        run.executor.close()
    return {**tested.weights, **tested.statistics, **run.server.extras}
