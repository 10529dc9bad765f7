"""Who may take part, and who says why not: nodes with other code, without the images, without room."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fedkeel
from fedkeel.data.federation import Federation
from fedkeel.engine import setup
from fedkeel.engine.executors.ray import crew, station
from fedkeel.engine.executors.ray.station import Station
from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.runs.run import Run
from tests import tiny
from tests.engine.executors.ray.pretend import PretendRay, pretend, wait_for_all
from tests.processes import until

NAMED: dict[str, Any] = {"data": "digits-shift", "subsample": 10, "model": "simple_cnn(width=2)", "rounds": 1}
NAMED |= {"device": "cpu", "threads": 1}
ON_RAY: dict[str, Any] = {**NAMED, "executor": "ray", "partial_means": False}


def on(node: str) -> bool:
    """Whether it is an actor of this node that is asked."""
    import ray

    return bool(ray.get_runtime_context().get_node_id() == node)


def instead(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, nodes: list[str], given: Callable[..., Any]
) -> None:
    """What actors of these nodes do in place of something."""
    plain = getattr(where, name)

    def do(*arguments: Any, **named: Any) -> Any:
        return given(plain, *arguments, **named) if any(map(on, nodes)) else plain(*arguments, **named)

    monkeypatch.setattr(where, name, do)


def worked(world: PretendRay, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """From now on, the nodes that train somebody; all that can are there when a run begins."""
    nodes: list[str] = []
    wait_for_all(monkeypatch)

    def fate(node: str, what: str) -> str:
        if what == "work":
            nodes.append(node)
        return ""

    world.fate = fate
    return nodes


def notes_of(caplog: pytest.LogCaptureFixture, about: str) -> list[str]:
    return [record.message for record in caplog.records if about in record.message]


# -- code --------------------------------------------------------------------------------------------------------------
OTHERS = [
    ({"fedkeel": "9.9", "code": "x"}, f"it has fedkeel 9.9, not {fedkeel.__version__}: install the same there"),
    ({"code": "x"}, f"it has fedkeel {fedkeel.__version__} with other code than here: install the same there"),
]


@pytest.mark.parametrize(("other", "reason"), OTHERS)
def test_a_node_with_another_version_sits_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    other: dict[str, str],
    reason: str,
) -> None:
    world = pretend(monkeypatch)
    instead(monkeypatch, Station, "hello", ["beta"], lambda plain, self: plain(self) | other)
    nodes = worked(world, monkeypatch)
    ray = tiny.run(tmp_path / "ray", executor="ray", threads=1, partial_means=False)
    assert set(nodes) == {"alpha"}
    assert notes_of(caplog, "sits out") == [f"The node 'beta' of the Ray cluster sits out: {reason}."]
    assert tiny.result(ray) == tiny.result(tiny.run(tmp_path / "serial", threads=1))
    assert not [actor for actor in world.actors if actor.node == "beta" and not actor.dead]


@pytest.mark.parametrize("options", [{}, {"ray_actors": 2, "ray_cores": 1}], ids=["everywhere", "where there is room"])
def test_if_no_node_is_fit_the_run_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    pretend(monkeypatch)
    instead(monkeypatch, Station, "hello", ["alpha", "beta"], lambda plain, self: plain(self) | OTHERS[0][0])
    with pytest.raises(TrainingError) as refused:
        tiny.run(tmp_path / "run", executor="ray", **options)
    text = str(refused.value)
    assert text.startswith("No node of the Ray cluster can take part, ")
    assert text.endswith("mend that and resume the run, or choose another executor.")
    assert f"it has fedkeel 9.9, not {fedkeel.__version__}" in text
    assert "\n" not in text


def test_a_node_where_actors_do_not_start_sits_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[str] = []

    def fate(node: str, what: str) -> str:
        if node == "beta" and what == "hello":
            tried.append(node)
            return "actor"
        return ""

    pretend(monkeypatch, fate=fate)
    tiny.run(tmp_path / "run", executor="ray")
    assert len(tried) == crew.MOST_STARTS
    (note,) = notes_of(caplog, "sits out")
    assert "no actor can be started there (the actor on beta died)" in note


def test_a_mistake_that_only_an_actor_finds_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise FedkeelError("That cannot be.")

    pretend(monkeypatch)
    monkeypatch.setattr(station, "Federation", refuse)
    with pytest.raises(FedkeelError, match=r"^That cannot be\.$"):
        tiny.run(tmp_path / "run", executor="ray")


def test_a_node_whose_memory_is_too_small_sits_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def lack(_: Any, *__: Any, **___: Any) -> None:
        raise MemoryError

    pretend(monkeypatch)
    instead(monkeypatch, station, "Federation", ["beta"], lack)
    tiny.run(tmp_path / "run", executor="ray")
    (note,) = notes_of(caplog, "sits out")
    assert "its memory does not suffice" in note


def test_what_cannot_be_sent_is_told_before_anything_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Holding(fedkeel.Method):
        """It holds what no other process can have."""

        def __init__(self) -> None:
            self.lock = threading.Lock()

    pretend(monkeypatch)
    with pytest.raises(FedkeelError, match=r"cannot be sent to other processes \(.*lock.*choose the executor") as told:
        tiny.run(tmp_path / "run", Holding(), executor="ray")
    assert "\n" not in str(told.value)


# -- images ------------------------------------------------------------------------------------------------------------
def named(tmp_path: Path, **options: Any) -> tuple[Run, Run]:
    """Under ray and under serial, of data that every machine could read."""
    ray = fedkeel.simulate({**ON_RAY, **options}, directory=tmp_path / "ray")
    others = {name: value for name, value in options.items() if not name.startswith("ray_")}
    return ray, fedkeel.simulate({**NAMED, "executor": "serial", **others}, directory=tmp_path / "serial")


def test_a_node_reads_the_images_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read: list[str] = []

    def noting(plain: Any, *arguments: Any) -> Any:
        read.append("beta")
        return plain(*arguments)

    world = pretend(monkeypatch)
    caplog.set_level(logging.INFO, "fedkeel")
    instead(monkeypatch, Station, "read", ["beta"], noting)
    nodes = worked(world, monkeypatch)
    ray, serial = named(tmp_path)
    assert tiny.result(ray) == tiny.result(serial)
    assert "beta" in nodes
    assert len(read) == 1  # however many actors there are
    assert notes_of(caplog, "images") == ["Node 'beta': it reads the images itself, from the same path."]


class EverybodyIsThere(tiny.Notes):
    """Before a round begins."""

    def __init__(self, crews: list[crew.Crew], count: int) -> None:
        super().__init__()
        self.crews, self.count = crews, count

    def round_done(self, round: int, rounds: int, scores: Any, loss: float) -> None:
        super().round_done(round, rounds, scores, loss)

        def is_so() -> bool:
            self.crews[-1].muster()
            self.crews[-1].attend()
            return len(self.crews[-1].seats) == self.count

        until(is_so)


def test_images_that_were_lost_with_the_actor_that_read_them_are_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They were its own, wherever they lie: the next one on that node finds nothing there."""
    died: list[str] = []

    def fate(node: str, what: str) -> str:
        if what != "work" or node != "beta" or died:
            return ""
        died.append(node)
        return "actor"

    world = pretend(monkeypatch, fate=fate)
    there = EverybodyIsThere(wait_for_all(monkeypatch), 2)
    caplog.set_level(logging.INFO)
    ray = fedkeel.simulate({**ON_RAY, "rounds": 3}, directory=tmp_path / "ray", observer=there)
    serial = fedkeel.simulate({**NAMED, "rounds": 3, "executor": "serial"}, directory=tmp_path / "serial")
    assert died == ["beta"]
    assert len(notes_of(caplog, "it reads the images itself")) == 2
    assert notes_of(caplog, "sits out") == []
    assert len([actor for actor in world.actors if actor.node == "beta"]) > 2  # one died, one found no images
    assert tiny.result(ray) == tiny.result(serial)


def inverted(federation: Federation) -> Federation:
    return replace(federation, images=255 - federation.images)


WITHOUT = {
    "not there": (
        "read",
        lambda *_: {"why": "There is no folder '/data/digits'."},
        "There is no folder '/data/digits'.",
    ),
    "others": (
        "load_federation",
        lambda plain, config: inverted(plain(config)),
        "what is there are other images.",
    ),
    "broken": ("load_federation", lambda *_: 1 / 0, "division by zero."),
}


@pytest.mark.parametrize("case", WITHOUT)
def test_a_node_without_the_images_gets_them_through_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    what, given, reason = WITHOUT[case]
    world = pretend(monkeypatch)
    instead(monkeypatch, Station if what == "read" else station, what, ["beta"], given)
    nodes = worked(world, monkeypatch)
    ray, serial = named(tmp_path)
    assert tiny.result(ray) == tiny.result(serial)
    assert "beta" in nodes
    (note,) = notes_of(caplog, "images")
    assert note.startswith("Node 'beta': ")
    assert note.endswith(f"MiB of images go there through the object store: {reason}")


def small_store(monkeypatch: pytest.MonkeyPatch, world: PretendRay, small: list[str]) -> None:
    plain = world.nodes

    def nodes() -> list[dict[str, Any]]:
        return [
            entry | {"Resources": {"CPU": 1, "object_store_memory": 1000 if entry["NodeID"] in small else 10**9}}
            for entry in plain()
        ]

    monkeypatch.setattr(world, "nodes", nodes)


def test_a_node_whose_object_store_is_too_small_sits_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = pretend(monkeypatch)
    small_store(monkeypatch, world, ["beta"])
    nodes = worked(world, monkeypatch)
    tiny.run(tmp_path / "run", executor="ray")
    assert set(nodes) == {"alpha"}
    (note,) = notes_of(caplog, "sits out")
    assert "its object store holds 0 MiB, and the images are 0" in note


def test_a_node_that_reads_them_needs_no_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = pretend(monkeypatch)
    small_store(monkeypatch, world, ["beta"])
    nodes = worked(world, monkeypatch)
    named(tmp_path)
    assert "beta" in nodes


def test_images_that_are_more_than_memory_do_not_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, put = setup.load_federation, list[str]()

    world = pretend(monkeypatch)
    world.cores["alpha"] = 2  # each actor maps them
    for module in (setup, station):
        monkeypatch.setattr(module, "load_federation", lambda config: replace(plain(config), on_disk=True))
    store = world.put
    monkeypatch.setattr(world, "put", lambda value: put.append(type(value).__name__) or store(value))  # type: ignore[func-returns-value]
    instead(monkeypatch, Station, "read", ["beta"], lambda *_: {"why": "there is no disk"})
    nodes = worked(world, monkeypatch)
    ray, serial = named(tmp_path, ray_cores=1)
    assert tiny.result(ray) == tiny.result(serial)
    assert set(nodes) == {"alpha"}
    assert "ndarray" not in put
    assert len([actor for actor in world.actors if actor.node == "alpha"]) == 2
    (note,) = notes_of(caplog, "sits out")
    assert "the images are more than memory holds, and it cannot read them (there is no disk)" in note


# -- room --------------------------------------------------------------------------------------------------------------
def test_more_cores_than_any_node_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = pretend(monkeypatch)
    world.cores = {"alpha": 4, "beta": 2}
    with pytest.raises(FedkeelError) as refused:
        tiny.run(tmp_path / "run", executor="ray", ray_cores=5)
    assert str(refused.value) == (
        "No node of the Ray cluster has room for an actor ('alpha' has 4 cores and 0 GPUs; 'beta' has 2 cores and 0 "
        "GPUs): give fewer 'ray_cores' or 'threads', or a smaller share 'ray_gpus'."
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("cuda", "'device' is 'cuda', but no node of the Ray cluster has a GPU: choose 'cpu'."),
        ("cuda:1", "'device' is 'cuda:1', and Ray chooses among GPUs by itself: give 'cuda' or 'cpu'."),
    ],
)
def test_devices_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, says: str) -> None:
    pretend(monkeypatch)
    with pytest.raises(FedkeelError) as refused:
        tiny.run(tmp_path / "run", executor="ray", device=device)
    assert str(refused.value) == says


def test_actors_take_groups_of_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = pretend(monkeypatch)
    world.cores = {"alpha": 4, "beta": 3}
    tiny.run(tmp_path / "run", executor="ray", ray_cores=2, workers=1)
    assert sorted(actor.node for actor in world.actors) == ["alpha", "alpha", "beta"]


@pytest.mark.parametrize(("options", "actors"), [({"ray_actors": 1}, 1), ({"ray_actors": 2, "ray_cores": 1}, 2)])
def test_no_more_actors_than_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], actors: int
) -> None:
    world = pretend(monkeypatch, ["alpha", "beta", "gamma"])
    tiny.run(tmp_path / "run", executor="ray", **options)
    assert len(world.actors) == actors


def test_no_actor_outlives_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = pretend(monkeypatch)
    tiny.run(tmp_path / "run", executor="ray")
    assert world.actors
    assert all(actor.dead for actor in world.actors)
