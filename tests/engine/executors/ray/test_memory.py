"""What clients remember on nodes: found wherever it lies, written for checkpoints, and not made up when it is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeel.core.state import Tensors
from fedkeel.engine.executors.ray.memory import Kept, RemoteMemory, given
from fedkeel.engine.executors.ray.parcels import packed, unpacked
from fedkeel.engine.memory import LostMemory
from fedkeel.engine.memory_files import MemoryFiles
from tests.engine.executors.ray.pretend import PretendRay, Ref, pretend


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> PretendRay:
    return pretend(monkeypatch)


def values(number: float) -> Tensors:
    return {"scaffold/c": torch.full((5,), number)}


def on(world: PretendRay, node: str, number: float) -> Kept:
    parcel = packed({"memory": values(number)})
    return Kept(Ref(world, parcel, node), node, 20)


def equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_it_is_read_from_where_it_lies(world: PretendRay) -> None:
    memory = RemoteMemory()
    memory.keep("ward", on(world, "beta", 1.0))
    memory.keep("clinic", values(2.0))
    assert memory.node("ward") == "beta"
    assert memory.node("clinic") == memory.node("nobody") == ""
    assert equal(memory.look("ward"), values(1.0))
    assert equal(memory.of("clinic"), values(2.0))
    assert memory.of("nobody") == {}
    assert sorted(memory) == ["clinic", "ward"]
    assert equal(dict(memory.items())["ward"], values(1.0))


def test_nothing_is_read_to_put_a_client_back(world: PretendRay, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = RemoteMemory()
    memory.keep("ward", on(world, "beta", 1.0))
    with monkeypatch.context() as patch:
        patch.setattr(world, "get", None)
        before = memory.present("ward")
        memory.keep("ward", on(world, "alpha", 7.0))
        memory.keep("ward", before)
    assert memory.node("ward") == "beta"
    assert equal(memory.look("ward"), values(1.0))
    assert memory.present("nobody") == {}


def test_a_checkpoint_has_it_and_a_memory_that_is_read_from_there(world: PretendRay, tmp_path: Path) -> None:
    memory = RemoteMemory(files=MemoryFiles(tmp_path))
    memory.keep("ward", on(world, "beta", 1.0))
    memory.write_files()
    world.gone.add("beta")
    assert equal(memory.look("ward"), values(1.0))
    assert memory.node("ward") == ""  # it is nobody's any more
    assert equal(memory.present("ward"), values(1.0))


def test_only_what_changed_is_written(world: PretendRay, tmp_path: Path) -> None:
    memory = RemoteMemory(files=MemoryFiles(tmp_path))
    memory.keep("ward", on(world, "beta", 1.0))
    memory.keep("clinic", on(world, "beta", 2.0))
    memory.write_files()
    world.gone.add("beta")  # so that it would fail
    memory.keep("ward", on(world, "alpha", 3.0))
    memory.write_files()
    assert equal(memory.look("clinic"), values(2.0))
    assert equal(memory.look("ward"), values(3.0))


def test_what_is_newer_than_the_checkpoint_is_lost(world: PretendRay, tmp_path: Path) -> None:
    memory = RemoteMemory(files=MemoryFiles(tmp_path))
    memory.keep("ward", on(world, "alpha", 1.0))
    memory.write_files()
    newer = on(world, "beta", 2.0)
    memory.keep("ward", newer)
    world.gone.add("beta")
    for look in (memory.look, memory.of, lambda client: memory.recovered(client, newer)):
        with pytest.raises(LostMemory, match="'ward' remembered was lost with its node"):
            look("ward")
    with pytest.raises(LostMemory):
        memory.write_files()


def test_what_a_pass_began_with_is_lost_if_the_client_has_moved_on(world: PretendRay, tmp_path: Path) -> None:
    """The checkpoint may be of either; the client must not be trained from the wrong one."""
    memory = RemoteMemory(files=MemoryFiles(tmp_path))
    before = on(world, "beta", 1.0)
    memory.keep("ward", before)
    memory.write_files()
    memory.keep("ward", on(world, "alpha", 2.0))
    memory.write_files()
    with pytest.raises(LostMemory):
        memory.recovered("ward", before)
    assert equal(memory.look("ward"), values(2.0))


def test_what_is_here_cannot_be_lost() -> None:
    memory = RemoteMemory()
    assert equal(memory.recovered("ward", values(1.0)), values(1.0))


def test_a_client_that_remembers_nothing_any_more(world: PretendRay, tmp_path: Path) -> None:
    memory = RemoteMemory(files=MemoryFiles(tmp_path))
    memory.keep("ward", on(world, "beta", 1.0))
    memory.write_files()
    memory.keep("ward", {})
    memory.write_files()
    assert "ward" not in memory
    assert memory.look("ward") == {}


def test_stateless_clients_remember_nothing(world: PretendRay) -> None:
    memory = RemoteMemory(stateless=True)
    memory.keep("ward", on(world, "beta", 1.0))
    assert list(memory) == []
    assert memory.look("ward") == {}


def test_an_actor_is_given_the_reference_and_not_the_tensors(world: PretendRay) -> None:
    kept = on(world, "beta", 1.0)
    assert given(kept) is kept.object
    assert given({}) is None
    put: Any = given(values(3.0))
    assert equal(unpacked(world.get(put))["memory"], values(3.0))
