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
from torch.utils._python_dispatch import TorchDispatchMode

from fedkeel import state
from fedkeel.data.federation import Federation
from fedkeel.engine.rounds import Federated
from fedkeel.engine.slot import copy_into, same_tensors, take_place
from fedkeel.messages import Broadcast, Update
from fedkeel.method import Method
from fedkeel.models.output import Output
from tests.methods.small import broadcast, started

Rows = list[list[float]]


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


class NoWaiting(TorchDispatchMode):
    """Fails on every operation that would make the host wait for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


def watched(method: Method, also: Callable[[], None] = lambda: None) -> Method:
    """The same method, which fails if a hook of its steps waits for the device."""

    class Watched(type(method)):  # type: ignore[misc]
        def inputs(self, client: Any, x: Any) -> Any:
            with NoWaiting():
                return super().inputs(client, x)

        def forward(self, client: Any, x: Any) -> Any:
            with NoWaiting():
                return super().forward(client, x)

        def loss(self, client: Any, batch: Any, output: Any) -> Any:
            also()
            with NoWaiting():
                return super().loss(client, batch, output)

    method.__class__ = Watched
    return method


def trained_in_the_place_of(run: Federated, first: str, second: str, sent: Broadcast) -> Update:
    """`second` trains with the objects of `first`, as in a slot whose graphs were captured for `first`: only tensors
    are copied to where those of `first` are."""
    worker = run.setup.worker
    captured = worker.begin(first, sent, {})
    for batch in worker.store.batches(worker.plan(first, sent.round), worker.federation.train_transform):
        worker.step(captured, batch)
    client = worker.begin(second, sent, {})
    views = captured.scratch["views"]
    for name, view in client.scratch["views"].items():
        copy_into(views[name].scratch, view.scratch)  # raises if the new client's cannot take their place
        same_tensors(views[name].extras, view.extras)
        take_place(views[name], view)
    take_place(captured, client)
    captured.optimizer = client.optimizer
    for batch in worker.store.batches(worker.plan(second, sent.round), worker.federation.train_transform):
        worker.step(captured, batch)
    return worker.leave(captured, 0.0)[0]


def assert_replayable(run: Federated, round: int) -> None:
    sent = broadcast(run, round)
    for first, second in (("client0", "client1"), ("client1", "client0")):
        replayed = trained_in_the_place_of(run, first, second, sent)
        direct = run.setup.worker.train(second, sent, {})[0]
        for group in ("weights", "statistics", "extras"):
            for name, tensor in getattr(direct, group).items():
                assert torch.equal(getattr(replayed, group)[name], tensor), name
