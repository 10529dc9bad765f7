"""What every method must stand: other executors, interruption, and sharing a slot with other clients."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedkeel.core.messages import Broadcast, Update
from fedkeel.core.state import Tensors
from fedkeel.engine.executors.cuda.slot import Slot
from fedkeel.engine.local import Worker
from fedkeel.engine.schedules import learning_rate_at
from tests import tiny

# Methods whose options change what is kept, sent or averaged: under every executor they are tried beside the defaults.
VARIANTS = ["hbn(variant=released)", "hbn(mix=global)", "scaffold+hbn(variant=released)", "fbn(variant=released)"]
VARIANTS += ["freeze(head=local)", "fedcoda(history_from=calibration)", "greg(warm_start=false)"]

QUESTIONS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select")


class AskNothing(TorchDispatchMode):
    """Inside, an operation that makes the host wait for a number is an error, as it is in a CUDA graph."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().partition("::")[2].partition(".")[0]
        assert name not in QUESTIONS, f"a step asks the host: {name}"
        return function(*args, **(kwargs or {}))


def through_one_slot(
    worker: Worker, broadcast: Broadcast, memories: Mapping[str, Tensors]
) -> list[tuple[Update, Tensors]]:
    """Train clients as a slot of the executor `cuda` does, without the graphs: one client object, into whose tensors
    those of the next are copied. All must fit the step that was recorded for the first."""
    assert worker.method.uncapturable == []
    optimizer: Any = worker.optimizer(learning_rate_at(worker.config, broadcast.round))
    slot: Any = SimpleNamespace(worker=worker, recorded={})
    results, first = [], None
    for name, memory in memories.items():
        optimizer.reset()
        client = Slot._adopt(slot, worker.begin(name, broadcast, memory, optimizer))
        first = first or client
        assert client is first, "the step would be recorded anew"
        with AskNothing():
            for batch in worker.store.batches(worker.plan(name, broadcast.round), worker.federation.train_transform):
                worker.step(client, batch)
        results.append(worker.leave(client, 0.0))
    return results


def assert_a_slot_serves_all(worker: Worker, broadcast: Broadcast, memories: Mapping[str, Tensors]) -> None:
    """The same updates and memories from one slot as from clients by themselves."""
    shared = through_one_slot(worker, broadcast, memories)
    for (name, memory), (update, kept) in zip(memories.items(), shared, strict=True):
        alone, remembered = worker.train(name, broadcast, memory)
        for one, other in ((update.weights, alone.weights), (update.statistics, alone.statistics)):
            assert_close(one, other)
        assert_close(update.extras, alone.extras)
        assert_close(kept, remembered)


def assert_close(given: Tensors, wanted: Tensors, atol: float = 1e-6) -> None:
    assert list(given) == list(wanted)
    for name, tensor in wanted.items():
        torch.testing.assert_close(given[name], tensor, rtol=1e-5, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


def assert_executors_agree(directory: Path, method: str, **options: Any) -> None:
    runs = [
        tiny.run(directory / executor, method, executor=executor, **options, **given)
        for executor, given in (("serial", {}), ("processes", {"workers": 2}))
    ]
    assert tiny.result(runs[0]) == tiny.result(runs[1])


class Interruption(Exception):
    pass


def assert_it_resumes(directory: Path, method: str, **options: Any) -> None:
    """Stopped after its second round and resumed, a run is bit for bit the run that was not."""

    def stop(round: int) -> None:
        if round == 1:
            raise Interruption

    whole = tiny.run(directory / "whole", method, rounds=4, **options)
    with pytest.raises(Interruption):
        tiny.run(directory / "stopped", method, rounds=4, observer=tiny.Notes(stop), **options)
    assert tiny.result(tiny.resume(directory / "stopped")) == tiny.result(whole)
