"""One pass over clients: what must hold of it besides that its results are those of `serial`."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fedkeel.core.messages import Update
from fedkeel.engine.executors.ray.memory import Kept, RemoteMemory
from fedkeel.engine.executors.ray.parcels import packed
from fedkeel.engine.executors.ray.passes import Pass
from fedkeel.engine.executors.ray.schedule import Speeds
from fedkeel.engine.executors.ray.station import Station
from tests import tiny
from tests.engine.executors.ray.pretend import pretend, wait_for_all


def test_a_sum_that_does_not_weigh_what_its_clients_do_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Station.take_sum

    def heavier(self: Station, number: int) -> Any:
        weight, parcel = plain(self, number)
        return weight + 1, parcel

    pretend(monkeypatch, ["alone"])
    monkeypatch.setattr(Station, "take_sum", heavier)
    with pytest.raises(RuntimeError, match=r"The sums of the nodes weigh 45, and their clients 44\."):
        tiny.run(tmp_path / "run", executor="ray", partial_means=True)


def test_home_is_where_a_memory_lies() -> None:
    memory = RemoteMemory()
    memory.keep("ward", Kept(None, "beta", 20))
    here: Any = SimpleNamespace(memory=memory, parts=[("ward", None), ("clinic", None)])
    alpha, beta = (SimpleNamespace(node=SimpleNamespace(id=name)) for name in ("alpha", "beta"))
    assert [Pass._is_home(here, seat, 0) for seat in (alpha, beta)] == [False, True]
    assert [Pass._is_home(here, seat, 1) for seat in (alpha, beta)] == [None, None]


def test_clients_stay_where_their_memory_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal clients of equal nodes: after the first round no memory moves, whoever is ready first."""
    world, moved = pretend(monkeypatch), list[str]()
    wait_for_all(monkeypatch)
    monkeypatch.setattr(Speeds, "measure", lambda *_: None)  # all are as fast as each other
    plain = Pass._send

    def send(self: Pass, seat: Any, places: list[int]) -> None:
        for place in places:
            home = self.memory.node(self.parts[place][0])
            if self.order.do == "train" and home not in ("", seat.node.id):
                moved.append(self.parts[place][0])
        plain(self, seat, places)

    monkeypatch.setattr(Pass, "_send", send)
    sizes = dict.fromkeys(["ward", "clinic"], 8)
    tiny.run(tmp_path / "run", "scaffold", on=tiny.federation(sizes), executor="ray", rounds=6, ray_cores=1)
    assert len(world.actors) == 2
    assert moved == []


def test_every_pass_gives_slow_actors_another_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    relaxed: list[Speeds] = []
    pretend(monkeypatch)
    monkeypatch.setattr(Speeds, "relax", lambda self: relaxed.append(self))
    tiny.run(tmp_path / "run", executor="ray", rounds=3)
    assert len(relaxed) >= 3
    assert len(set(map(id, relaxed))) == 1


def test_a_pass_that_is_given_up_does_not_reach_into_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its actors are still at is of no use; they are replaced."""
    pretend(monkeypatch)
    wait_for_all(monkeypatch)
    names = list(tiny.SIZES)
    ray, serial = tiny.setup("scaffold", executor="ray", threads=1), tiny.setup("scaffold", threads=1)
    there, here = ray.executor(), serial.executor()
    try:
        left = there.train(names, tiny.broadcast(ray.worker))
        next(iter(left))
        del left
        for client in names:
            there.memory.keep(client, {})
        for round in (1, 2):
            broadcast = tiny.broadcast(ray.worker, round)  # whose model trains elsewhere
            found, expected = list(there.train(names, broadcast)), list(here.train(names, broadcast))
            for one, other in zip(found, expected, strict=True):
                assert isinstance(one, Update)
                assert isinstance(other, Update)
                assert one.header == other.header
                assert packed(one.groups)[0] == packed(other.groups)[0]
                assert all(map(np.array_equal, packed(one.groups)[1], packed(other.groups)[1]))
    finally:
        there.close()
        here.close()
