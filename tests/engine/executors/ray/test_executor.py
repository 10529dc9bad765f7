from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedkeel import methods
from fedkeel.engine.executors.ray import passes, station
from fedkeel.runs.run import Run
from tests import tiny
from tests.engine.executors.ray.pretend import RayActorError, pretend
from tests.engine.executors.test_processes import tensors

ALL = [entry.name for entry in methods.METHODS]


def both(tmp_path: Path, method: Any, **options: Any) -> tuple[Run, Run]:
    """The run under serial, and under ray."""
    common: dict[str, Any] = {"on": tiny.federation(unseen=4), "rounds": 2, "threads": 1}
    common |= {name: options.pop(name) for name in tuple(options) if not name.startswith(("ray_", "partial_"))}
    serial = tiny.run(tmp_path / "serial", method, **common)
    return serial, tiny.run(tmp_path / "ray", method, executor="ray", **common, **options)


def close(one: Run, other: Run) -> None:
    reference, found = tensors(one), tensors(other)
    assert reference.keys() == found.keys()
    for name, tensor in reference.items():
        torch.testing.assert_close(found[name], tensor, rtol=5e-3, atol=5e-5)  # one bit in a mean grows
    for key in ("round", "client", "domain", "samples", "bytes_up", "bytes_down", "accuracy", "average"):
        assert [r.get(key) for r in one.records()] == [r.get(key) for r in other.records()], key


@pytest.mark.parametrize("method", ALL)
def test_every_method_has_the_bits_of_serial_and_partial_means_agree_whoever_adds_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    pretend(monkeypatch)
    serial, ray = both(tmp_path, method, partial_means=False)
    assert tiny.result(serial) == tiny.result(ray)
    options: dict[str, Any] = {"on": tiny.federation(unseen=4), "rounds": 2, "executor": "ray", "threads": 1}
    pretend(monkeypatch)
    added = tiny.run(tmp_path / "added", method, **options)
    close(serial, added)
    pretend(monkeypatch, ["alone"], seed=1)
    again = tiny.run(tmp_path / "again", method, **options)
    assert tiny.result(added) == tiny.result(again)


OPTIONS: list[dict[str, Any]] = [
    {"weighting": "uniform"},
    {"robust": "trimmed-mean(share=0.4)"},
    {"dp": "central", "weighting": "uniform"},
    {"method": "gn", "dp": "local"},
    {"method": "scaffold+hbn"},
    {"method": "fedprox(mu=0.1)+greg"},
    {"participation": 0.5, "method": "scaffold"},
    {"record": "statistics-divergence,loss-gap", "record_every": 1},
    {"evaluate_with": "all", "site_images": 4},
    {"metrics": "auc,top(k=2)", "predictions": True, "method": "fedbn"},
    {"stateless": True},
    {"evaluation_batch": 1, "result": "best-validation"},
    {"local_epochs": 3, "optimizer": "adam", "schedule": "cosine"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_has_the_bits_of_serial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    pretend(monkeypatch, ["alpha", "beta", "gamma"])
    serial, ray = both(tmp_path, **{"method": "fedavg", **options, "partial_means": False})
    assert tiny.result(serial) == tiny.result(ray)
    for name in ("predictions", "diagnostics"):
        for path in sorted((serial.directory / name).glob("**/*.*")):
            there = ray.directory / path.relative_to(serial.directory)
            assert path.read_bytes() == there.read_bytes(), path


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("whole", [False, True], ids=["sums", "updates"])
def test_actors_that_die_at_any_moment_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, whole: bool
) -> None:
    """Also what clients remember: SCAFFOLD's control variates."""
    drawn = random.Random(seed)
    left = 3  # so many in all: a client whose actors die four times is given up

    def fate(_node: str, what: str) -> str:
        nonlocal left
        if what not in ("work", "take_sum", "combine") or drawn.random() > 0.15 or not left:
            return ""
        left -= 1
        return "actor"

    options: dict[str, Any] = {
        "on": tiny.federation(unseen=4),
        "threads": 1,
        "executor": "ray",
        "partial_means": not whole,
    }
    pretend(monkeypatch, seed=seed)
    calm = tiny.run(tmp_path / "calm", "scaffold", **options)
    pretend(monkeypatch, fate=fate, seed=seed)
    stormy = tiny.run(tmp_path / "stormy", "scaffold", **options)
    assert left < 3
    assert tiny.result(calm) == tiny.result(stormy)


def test_an_actor_that_outlives_its_node_for_a_moment_is_no_client_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can still say that it found its store closed, which is Ray's trouble and not the client's."""
    moments = iter(range(1000))

    def fate(node: str, what: str) -> str:
        return "raylet" if what == "work" and node == "beta" and next(moments) == 9 else ""

    options: dict[str, Any] = {"on": tiny.federation(), "threads": 1, "executor": "ray", "rounds": 6}
    pretend(monkeypatch)
    calm = tiny.run(tmp_path / "calm", "scaffold", **options)
    world = pretend(monkeypatch, fate=fate)
    stormy = tiny.run(tmp_path / "stormy", "scaffold", **options)
    assert world.gone == {"beta"}
    assert tiny.result(calm) == tiny.result(stormy)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("every", [1, 3], ids=["checkpoints", "few checkpoints"])
def test_a_node_that_dies_takes_its_clients_memories_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, every: int
) -> None:
    """They are in the last checkpoint; if that is not the same, the run begins there again."""
    moments = iter(range(1000))
    fatal = random.Random(seed).randrange(12, 40)

    def fate(node: str, what: str) -> str:
        return "node" if what == "work" and next(moments) >= fatal and node == "beta" else ""

    options: dict[str, Any] = {"on": tiny.federation(), "threads": 1, "executor": "ray", "checkpoint_every": every}
    options |= {"rounds": 6, "partial_means": False}
    pretend(monkeypatch)
    calm = tiny.run(tmp_path / "calm", "scaffold", **options)
    world = pretend(monkeypatch, fate=fate, seed=seed)
    notes = tiny.Notes()
    stormy = tiny.run(tmp_path / "stormy", "scaffold", observer=notes, **options)
    assert world.gone == {"beta"}
    assert tiny.result(calm) == tiny.result(stormy)
    again = [note for note in notes.notes if "goes on from there" in note]
    assert len(again) <= 1  # not where the checkpoint is that of the round before


def test_a_node_that_joins_is_used_from_the_next_round_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[tuple[str, str]] = []
    world = pretend(monkeypatch, ["alpha"], fate=lambda node, what: did.append((node, what)) or "")  # type: ignore[func-returns-value]

    def after(round: int) -> None:
        if round == 0:
            world.cores["beta"] = 1

    tiny.run(tmp_path / "run", observer=tiny.Notes(after), executor="ray", rounds=12)
    assert ("beta", "work") in did


def test_a_client_whose_actors_die_again_and_again_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    plain = station.Station._results

    def noting(self: Any, executor: Any, order: Any, tasks: Any) -> Any:
        if order.do == "train" and tasks[0][1] == "clinic":
            raise RayActorError("the actor died")
        return plain(self, executor, order, tasks)

    monkeypatch.setattr(station.Station, "_results", noting)
    notes = tiny.Notes()
    run = tiny.run(tmp_path / "run", executor="ray", rounds=1, observer=notes)
    assert [record["client"] for record in run.records("dropped")] == ["clinic"]
    assert any("'clinic' is dropped, its actor on the node" in note for note in notes.notes)


def test_an_actor_that_hangs_is_given_up_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pretend(monkeypatch)
    calm = tiny.run(tmp_path / "calm", "scaffold", executor="ray", threads=1)
    world = pretend(monkeypatch)

    def after(round: int) -> None:
        world.hanging = world.actors[:1] if round == 0 else []

    clock = SimpleNamespace(perf_counter=lambda: 4000.0 * world.silences, sleep=lambda _: None)
    monkeypatch.setattr(passes, "time", clock)
    run = tiny.run(tmp_path / "run", "scaffold", executor="ray", threads=1, observer=tiny.Notes(after))
    assert "has not said anything for 3600 s; what it had to do" in caplog.text
    assert tiny.result(calm) == tiny.result(run)
