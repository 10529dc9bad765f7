from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from fedkeel.core.client import LocalClient
from fedkeel.core.messages import Update
from fedkeel.core.method import Method
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.engine.tasks import Result, Task
from fedkeel.runs.run import Run
from tests import tiny
from tests.engine.test_local import Spoils

SEVEN = {name: 3 + i for i, name in enumerate("gfedcba")}  # not in alphabetical order


def participants(run: Run) -> list[list[str]]:
    clients = run.records("client")
    return [[r["client"] for r in clients if r["round"] == round] for round in range(run.config.rounds)]


def model(run: Run) -> dict[str, Tensor]:
    return safetensors.torch.load_file(run.directory / "model.safetensors")


@pytest.mark.parametrize(("participation", "count"), [(0.4, 3), (0.01, 1), (0.5, 4), (1.0, 7)])
def test_a_fraction_of_the_clients_takes_part_in_the_federations_order(
    tmp_path: Path, participation: float, count: int
) -> None:
    run = tiny.run(tmp_path / "r", on=tiny.federation(SEVEN), participation=participation, rounds=4)
    for names in participants(run):
        assert len(names) == count
        assert names == [name for name in SEVEN if name in names]


def test_sampling_is_seeded_and_changes_from_round_to_round(tmp_path: Path) -> None:
    def sampled(name: str, **options: Any) -> list[list[str]]:
        return participants(
            tiny.run(tmp_path / name, on=tiny.federation(SEVEN), participation=0.4, rounds=5, **options)
        )

    first = sampled("a")
    assert first == sampled("b", learning_rate=0.001)
    assert first != sampled("c", seed=1)
    assert len({tuple(names) for names in first}) > 1


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_global_model_is_the_weighted_mean_of_the_updates(tmp_path: Path, weighting: str) -> None:
    run = tiny.run(tmp_path / "r", weighting=weighting, rounds=1)
    worker = tiny.setup().worker
    message = tiny.broadcast(worker)
    updates = [worker.train(name, message, {})[0] for name in tiny.SIZES]
    shares = [14, 9, 21] if weighting == "samples" else [1, 1, 1]
    for name, tensor in model(run).items():
        values = [{**u.weights, **u.statistics}[name].double() for u in updates]
        if name.endswith("num_batches_tracked"):
            assert (
                int(tensor) == max(int(v) for v in values) == 5
            )  # hospital: 21 = 5 x 4 + 1, a single one does not count
            assert tensor.dtype == torch.int64
            continue
        expected = sum(s * v for s, v in zip(shares, values, strict=True)) / sum(shares)
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)


def test_with_fewer_than_min_clients_the_global_model_is_unchanged(tmp_path: Path) -> None:
    notes = tiny.Notes()
    run = tiny.run(tmp_path / "r", Spoils({"clinic"}), min_clients=3, rounds=2, observer=notes)
    for name, tensor in tiny.model().state_dict().items():
        assert torch.equal(model(run)[name], tensor)
    assert any("2 usable updates, fewer than 'min_clients' (3)" in note for note in notes.notes)
    enough = tiny.run(tmp_path / "enough", Spoils({"clinic"}), min_clients=2, rounds=2)
    assert not torch.equal(model(enough)["head.weight"], tiny.model().head.weight)


class Lies(Method):
    """One client's update is not what it should be."""

    name = "lies"

    def finish(self, client: LocalClient) -> Tensors:
        with torch.no_grad():
            if client.name == "clinic":
                client.model.encoder[1].running_var.fill_(-1.0)  # type: ignore[index, union-attr, operator]
        return {}


def test_an_update_that_fails_the_check_is_dropped_and_named(tmp_path: Path) -> None:
    notes = tiny.Notes()
    run = tiny.run(tmp_path / "r", Lies(), rounds=1, observer=notes)
    reason = "the variance 'encoder.1.running_var' is negative"
    assert notes.notes == [f"Round 1: the update of 'clinic' is dropped, {reason}."]
    assert run.records("dropped") == [{"kind": "dropped", "round": 0, "client": "clinic", "reason": reason}]


class WildStatistics(Method):
    """Server rules that extrapolate."""

    name = "wild"

    def statistics(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        return {name: t - 5 if t.dtype.is_floating_point else t for name, t in mean.items()}


class WildTest(Method):
    name = "wildtest"

    def before_evaluation(self, server: Server) -> None:
        server.statistics = {name: t - 5 if t.dtype.is_floating_point else t for name, t in server.statistics.items()}


@pytest.mark.parametrize("method", [WildStatistics(), WildTest()])
def test_no_rule_leaves_a_variance_negative(tmp_path: Path, method: Method) -> None:
    result = model(tiny.run(tmp_path / "r", method, rounds=1))
    assert torch.equal(result["encoder.1.running_var"], torch.zeros(4))
    assert (result["encoder.1.running_mean"] < 0).any()


class TestsAnother(Method):
    """The tested copy differs from what training goes on with."""

    name = "tests"

    def before_evaluation(self, server: Server) -> None:
        server.weights = {name: torch.zeros_like(t) for name, t in server.weights.items()}
        server.memory["times"] = server.memory.get("times", torch.zeros(())) + 1
        assert server.memory["times"].item() == server.round + 1


def test_what_is_only_tested_does_not_change_training_and_is_the_result(tmp_path: Path) -> None:
    plain, run = tiny.run(tmp_path / "plain", rounds=3), tiny.run(tmp_path / "r", TestsAnother(), rounds=3)
    assert plain.records("client") == run.records("client")
    assert all(t.eq(0).all() for name, t in model(run).items() if "running" not in name and "num_" not in name)


def test_a_metric_cannot_pose_as_something_else(tmp_path: Path) -> None:
    from fedkeel.engine.rounds import Federated
    from fedkeel.runs.store import Store

    setup = tiny.setup()
    store = Store.create(tmp_path / "r", setup.config)
    executor = setup.executor()
    plain = executor.map

    def liar(tasks: Sequence[Task], broadcast: Any) -> Any:
        for result in plain(tasks, broadcast):
            if isinstance(result, Result) and isinstance(result.outcome, Update):
                result = replace(
                    result, outcome=replace(result.outcome, metrics={"loss": 1.0, "kind": 2.0, "client": 3.0})
                )
            yield result

    executor.map = liar  # type: ignore[method-assign]
    Federated(setup, executor, store, tiny.Notes()).round(0)
    store.flush()
    assert [r["client"] for r in Run(tmp_path / "r").records("client")] == list(tiny.SIZES)
    store.close()


def test_bytes_are_counted_both_ways(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r", rounds=2)
    size = sum(t.numel() * t.element_size() for t in tiny.model().state_dict().values())
    assert [(r["bytes_up"], r["bytes_down"]) for r in run.records("round")] == [(3 * size, 3 * size)] * 2
    kept = tiny.run(tmp_path / "fedbn", "fedbn", rounds=1)
    local = sum(
        t.numel() * t.element_size() for n, t in tiny.model().state_dict().items() if n.startswith("encoder.1.")
    )
    assert kept.records("round")[0]["bytes_up"] == 3 * (size - local)


def test_the_observer_hears_of_every_round(tmp_path: Path) -> None:
    notes = tiny.Notes()
    tiny.run(tmp_path / "r", rounds=3, observer=notes)
    assert (notes.first, notes.rounds) == (0, [0, 1, 2])
