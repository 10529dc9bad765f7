"""How many steps a graph has changes nothing but the time, and the run finds out which number is fastest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fedkeel.core.client import LocalClient
from fedkeel.core.method import Method, Traits
from fedkeel.engine.executors.cuda import executor as executors
from fedkeel.engine.executors.cuda import slot as slots
from fedkeel.engine.executors.cuda.executor import CudaExecutor
from fedkeel.engine.executors.cuda.lengths import FEWEST_ROUNDS, MOST_ROUNDS, GraphLength
from fedkeel.engine.memory import ClientMemory
from tests import tiny
from tests.engine.executors.pretended import Card, Graph
from tests.engine.executors.test_cuda import assert_same, card

__all__ = ["card"]

STEPS = {"long": 45, "short": 37}  # of a client in a round
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there is one")


def settled(length: int) -> Any:
    return SimpleNamespace(steps=length, is_settled=True, see=lambda *_: None, settle=lambda: False)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["fedavg", "greg"])
def test_runs_are_the_same_whatever_the_length(
    method: str, card: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"on": tiny.federation({"a": 75, "b": 34, "c": 9}), "rounds": 2, "precision": "float32"}
    expected = tiny.run(tmp_path / "serial", method, device=card.device, **options)
    replays = []
    for length in (16, 4, 2, 1):
        monkeypatch.setattr(executors, "GraphLength", lambda length=length: settled(length))
        before = getattr(card, "replays", 0)
        run = tiny.run(tmp_path / str(length), method, device=card.device, executor="cuda", **options)
        assert_same(*(load_file(made.directory / "model.safetensors") for made in (expected, run)))
        replays.append(getattr(card, "replays", -length) - before)
    assert replays == sorted(set(replays))  # the longer, the fewer


def steps_of(graph: Graph) -> int:
    return sum("_fused_sgd_" in operation[0].name() for operation in graph.operations)


class Round:
    """Trains the same clients again and again, by a clock that replays and captures alone move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: Callable[[float], float]) -> None:
        self.clock = 0.0
        self.setup = tiny.setup(on=tiny.federation({name: 4 * steps for name, steps in STEPS.items()}))
        self.executor = CudaExecutor(self.setup.worker, ClientMemory(), workers=2)
        self.message = tiny.broadcast(self.setup.worker, rounds=1000)
        replay, one = Graph.replay, Graph.capture_end
        time = SimpleNamespace(perf_counter=lambda: self.clock)

        def timed(graph: Graph) -> None:
            self.clock += cost(steps_of(graph))
            replay(graph)

        def captured(graph: Graph) -> None:
            one(graph)
            self.clock += 60 * steps_of(graph)  # the host takes so much longer

        monkeypatch.setattr(executors, "time", time)
        monkeypatch.setattr(slots, "time", time)
        monkeypatch.setattr(Graph, "replay", timed)
        monkeypatch.setattr(Graph, "capture_end", captured)

    def train(self, left: int = 1000) -> None:
        message = tiny.broadcast(self.setup.worker, rounds=left)
        assert len(list(self.executor.train(list(STEPS), message))) == len(STEPS)

    def length(self, most: int = 60) -> int:
        for _ in range(most):
            self.train()
            if not self.executor.is_trying:
                return self.executor._length.steps
        raise AssertionError("it never settled")


@no_gpu
@pytest.mark.parametrize(
    ("cost", "length"),
    [
        (lambda steps: 2 + steps, 16),
        (lambda steps: 0.05 + steps, 2),  # not 3 % faster
        (lambda steps: steps**1.5, 1),
    ],
    ids=["launches count", "no matter", "long ones wait"],
)
def test_the_length_is_the_fastest_one(
    cost: Callable[[float], float], length: int, card: Card, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level("INFO")
    card.is_idle = True
    rounds = Round(monkeypatch, cost)
    assert rounds.length() == length
    assert f"Graphs of {length} local steps" in caplog.text
    assert rounds.executor.about() == {"graph": f"{length} steps"}


@no_gpu
def test_a_short_run_tries_nothing(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    card.is_idle = True
    rounds = Round(monkeypatch, lambda steps: 2 + steps)
    for left in range(10, 0, -1):
        rounds.train(left)
    assert rounds.executor._length.steps == 2
    assert all(graphs.keys() <= {1, 2} for graphs in graphs_of(rounds.executor))


def graphs_of(executor: CudaExecutor) -> list[dict[int, Any]]:
    recorded = [known for slot in executor._slots for known in slot.recorded.values()]
    return [graphs for known in recorded for graphs in known.graphs.values()]


@no_gpu
def test_where_long_graphs_do_not_fit_the_slots_stay_and_the_graphs_are_short(
    card: Card, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    rounds = Round(monkeypatch, lambda steps: 2 + steps)
    end = Graph.capture_end

    def too_long(graph: Graph) -> None:
        end(graph)
        if rounds.executor._length.steps > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Graph, "capture_end", too_long)
    card.is_idle = True
    assert rounds.length() == 4
    assert len(rounds.executor._slots) == 2
    assert "fewer clients at once" not in caplog.text


class Looks(Method):
    """Its steps look at how many batches the batch norm has seen."""

    name = "looks"
    traits = Traits(capturable=True)

    def inputs(self, client: LocalClient, x: Tensor) -> Tensor:
        norm: Any = client.model.encoder[1]  # type: ignore[index]
        return x * (1 + 0.01 * norm.num_batches_tracked)


@no_gpu
def test_beside_its_steps_a_graph_has_four_operations(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that gather the samples of all steps, one that goes on to the next, one for all counters of batch norms."""
    card.is_idle = True
    rounds = Round(monkeypatch, lambda steps: 2 + steps)
    rounds.length()
    of_size = next(graphs for graphs in graphs_of(rounds.executor) if 16 in graphs)
    counts = {steps: len(graph.operations) for steps, graph in of_size.items()}
    step = (counts[16] - counts[8]) // 8
    assert {steps: count - steps * step for steps, count in counts.items()} == dict.fromkeys(counts, 4)


@no_gpu
def test_a_step_that_looks_at_a_counter_is_captured_with_it(card: Card, tmp_path: Path) -> None:
    results = [
        tiny.result(tiny.run(tmp_path / how, Looks(), executor=how))["model.safetensors"] for how in ("serial", "cuda")
    ]
    assert results[0] == results[1]
    assert card.replays > 0


def round_of(length: GraphLength, seconds: float, steps: int = 100, captured: int = 0) -> None:
    slot: Any = SimpleNamespace(captured=(0.1 * captured, captured), queued=steps)
    length.see([slot], 1, seconds, rounds_left=10_000)


def test_a_round_with_captures_says_nothing_of_the_length() -> None:
    length = GraphLength()
    for _ in range(2 * MOST_ROUNDS):
        round_of(length, 1.0, captured=2)
    assert length.steps == 2
    for _ in range(FEWEST_ROUNDS):
        round_of(length, 1.0)
    assert length.steps == 4
    for _ in range(FEWEST_ROUNDS):
        round_of(length, 99.0, captured=4)  # slow for its captures, which do not count
        round_of(length, 0.5)
    assert length.steps == 8


def test_where_rounds_are_unlike_more_of_them_are_measured() -> None:
    length = GraphLength()
    for i in range(MOST_ROUNDS):
        assert length.steps == 2
        round_of(length, 1.0 + i % 2)
    assert length.steps == 4


def test_clients_of_few_steps_get_no_graphs_that_they_would_hardly_replay() -> None:
    length = GraphLength()
    for seconds in (1.0, 0.5, 0.25):
        for _ in range(FEWEST_ROUNDS):
            round_of(length, seconds, steps=8)  # of one client
    assert (length.steps, length.is_settled) == (4, True)
