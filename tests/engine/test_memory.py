"""What clients remember: a file per client and round, the newest that a checkpoint knows counts; and a run that is
killed between any two of its writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeel.core.naming import file_name
from fedkeel.core.state import Tensors
from fedkeel.engine.memory import ClientMemory, Damaged
from fedkeel.errors import StoreError
from tests import tiny


def remembered(value: float, numbers: int = 25) -> Tensors:
    """A hundred bytes for 25 numbers."""
    return {"part/x": torch.full((numbers,), float(value))}


def value(memory: Tensors) -> float | None:
    return float(memory["part/x"][0]) if memory else None


def values(memory: ClientMemory) -> dict[str, float | None]:
    return {client: value(tensors) for client, tensors in memory.items()}


def files(folder: Path) -> list[str]:
    return sorted(f"{path.parent.name}/{int(path.stem)}" for path in folder.rglob("*.safetensors"))


# -- in memory and in files ----------------------------------------------------------------------------------
def test_nothing_is_written_before_a_checkpoint_is(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path / "memory")
    for name in "abc":
        memory.keep(name, remembered(1))
    assert not (tmp_path / "memory").exists()
    memory.commit(0)
    assert files(tmp_path / "memory") == [f"{file_name(name)}/0" for name in "abc"]


def test_what_did_not_change_is_not_written_again(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path)
    memory.keep("a", remembered(1))
    memory.commit(0)
    memory.commit(1)
    memory.keep("b", remembered(2))
    memory.commit(2)
    assert files(tmp_path) == [f"{file_name('a')}/0", f"{file_name('b')}/2"]


def test_every_kind_of_tensor_comes_back_bit_for_bit_in_its_order(tmp_path: Path) -> None:
    tensors = {
        "z": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]),
        "local/encoder.1.num_batches_tracked": torch.tensor(2**40),
        "a": torch.randn(3, 4).to(torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "strided": torch.arange(12.0).reshape(3, 4).t(),
        "empty": torch.empty(0, 3),
    }
    memory = ClientMemory(tmp_path)
    memory.keep("a client/with any name", tensors)
    memory.commit(0)
    back = memory.look("a client/with any name")
    assert isinstance(back, dict)
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        bits = [t.contiguous().flatten().view(torch.uint8).tolist() for t in (back[name], tensor) if t.numel()]
        assert bits[:1] == bits[1:]


def test_a_handle_is_passed_on_and_asked_only_for_what_is_written(tmp_path: Path) -> None:
    asked: list[int] = []

    def handle() -> Tensors:
        asked.append(1)
        return remembered(5)

    memory = ClientMemory(tmp_path)
    memory.keep("a", handle)
    assert memory.look("a") is handle
    assert not asked
    memory.commit(0)
    memory.commit(1)
    assert asked == [1]
    assert value(ClientMemory(tmp_path).as_of(0)("a")) == 5


def test_who_remembers_nothing_is_none_who_does_and_one_may_forget(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path)
    memory.keep("a", {})
    assert "a" not in memory
    assert memory.look("a") == {}
    memory.keep("b", remembered(1))
    memory.commit(0)
    memory.keep("b", {})
    memory.commit(1)
    assert [value(memory.as_of(round)("b")) for round in (0, 1)] == [1, None]


def test_stateless_clients_remember_nothing(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path, stateless=True)
    memory.keep("a", remembered(1))
    memory.commit(0)
    assert memory.look("a") == {}
    assert not files(tmp_path)


# -- checkpoints ---------------------------------------------------------------------------------------------
def test_each_commit_can_be_gone_back_to_as_long_as_it_is_kept(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path)
    memory.keep("a", remembered(1))
    memory.keep("b", remembered(2))
    first = memory.commit(0)
    memory.release(0)
    memory.keep("a", remembered(10))
    memory.keep("c", remembered(3))
    second = memory.commit(1)
    memory.release(0)  # the checkpoint of round 0 is still there
    memory.keep("a", remembered(99))
    memory.commit(2)  # and here it is killed
    for round, reference, expected in ((1, second, {"a": 10, "b": 2, "c": 3}), (0, first, {"a": 1, "b": 2})):
        again = ClientMemory(tmp_path)
        look = again.as_of(round)  # without going back
        assert {client: value(look(client)) for client in "abc" if look(client)} == expected
        again.check(reference, round)
        again.restore(round)
        assert values(again) == expected
        assert max(int(file[-1]) for file in files(tmp_path)) == round  # what came later is gone
    again.restore()
    assert values(again) == {}
    assert not files(tmp_path)


def test_files_go_when_no_checkpoint_speaks_of_them(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path)
    for round in range(6):
        memory.keep("always", remembered(round))
        if round == 0:
            memory.keep("once", remembered(-1))
        memory.commit(round)
        memory.release(max(0, round - 1))
        kept = [f"{file_name('always')}/{n}" for n in range(max(0, round - 1), round + 1)]
        assert files(tmp_path) == [*kept, f"{file_name('once')}/0"]
    assert value(memory.as_of(4)("always")) == 4


def test_damage_is_told_when_it_is_read(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path)
    for name in ("one", "other"):
        memory.keep(name, remembered(1))
    memory.commit(0)
    one, other = (next((tmp_path / file_name(name)).iterdir()) for name in ("one", "other"))
    intact = one.read_bytes()
    for damaged, told in (
        (intact[:-1] + b"!", "its checksum does not match"),
        (b"", ""),
        (other.read_bytes(), "another"),
    ):
        one.write_bytes(damaged)
        with pytest.raises(
            StoreError, match=rf"cannot be read from '{one}' \(.*{told}.*\): put the file back"
        ) as caught:
            ClientMemory(tmp_path).as_of(0)("one")
        assert "\n" not in str(caught.value)


def test_files_that_are_missing_are_noticed_before_a_run_goes_on(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path)
    memory.keep("old", remembered(1))
    memory.commit(0)
    memory.keep("new", remembered(2))
    reference = memory.commit(1)
    old, new = (next((tmp_path / file_name(name)).iterdir()) for name in ("old", "new"))
    ClientMemory(tmp_path).check(reference, 1)
    new.rename(new.with_name("000000.safetensors"))  # as an older one of the same client
    with pytest.raises(Damaged, match="the memories of 0 clients, not of 1"):
        ClientMemory(tmp_path).check(reference, 1)
    old.unlink()
    with pytest.raises(Damaged, match="the memories of 1 clients, not of 2"):
        ClientMemory(tmp_path).check(reference, 1)


# -- whole runs ----------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_checkpoint_costs_what_changed_not_what_all_remember(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty clients, two a round: at the end as many files are written a round as in the beginning."""
    written: list[Path] = []
    plain = Path.write_bytes

    def noted(self: Path, data: bytes) -> int:
        written.extend([self] if "memory" in self.parts else [])
        return plain(self, data)

    monkeypatch.setattr(Path, "write_bytes", noted)
    on = tiny.federation({f"c{i:02d}": 3 for i in range(40)})
    per_round: list[int] = []
    sizes: list[int] = []

    def look(_: int) -> None:
        per_round.append(len(written))
        written.clear()
        folder = max((tmp_path / "r" / "checkpoints").iterdir())
        sizes.append(sum(path.stat().st_size for path in folder.iterdir()))

    tiny.run(tmp_path / "r", "fedbn", on=on, participation=0.05, rounds=12, observer=tiny.Notes(look))
    assert per_round == [2] * 12
    assert max(sizes) - min(sizes) < 50  # numbers with more digits


# -- killed between any two writes ---------------------------------------------------------------------------
OPTIONS: dict[str, Any] = {"rounds": 4, "participation": 0.7}


def killed_after(steps: int, act: Callable[[], Any]) -> int:
    """Do it in a process of its own, which is gone, without any goodbye, before it touches a file for the
    `steps`+1st time. Returns how the process ended: 9 if it was killed, 0 if it came to its end."""
    child = os.fork()
    if child == 0:
        left = [steps]

        def counting(plain: Callable[..., Any]) -> Callable[..., Any]:
            def step(*arguments: Any, **options: Any) -> Any:
                if left[0] == 0:
                    os._exit(9)
                left[0] -= 1
                return plain(*arguments, **options)

            return step

        for where, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (os, "unlink"), (os, "rmdir"),
                            (Path, "write_bytes"), (Path, "unlink"), (Path, "mkdir")):  # fmt: skip
            setattr(where, name, counting(getattr(where, name)))
        try:
            act()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_and_resume(tmp_path: Path, whole: dict[str, bytes], moments: list[int]) -> int:
    """Returns how many of these moments came before the run's end."""
    kills = 0
    for moment in moments:
        directory = tmp_path / str(moment)
        end = killed_after(moment, lambda d=directory: tiny.run(d, "fedbn", **OPTIONS))  # type: ignore[misc]
        assert end in (0, 9)
        kills += end == 9
        if not (directory / "config.toml").exists():
            continue
        # Killed once more on the way, and then left in peace.
        assert killed_after(moment % 13, lambda d=directory: tiny.resume(d)) in (0, 9)  # type: ignore[misc]
        assert tiny.result(tiny.resume(directory)) == whole, moment
    return kills


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return tiny.result(tiny.run(tmp_path_factory.mktemp("whole") / "run", "fedbn", **OPTIONS))


@pytest.mark.slow
def test_killed_between_two_writes_and_resumed_it_is_the_same_run(tmp_path: Path, whole: dict[str, bytes]) -> None:
    moments = list(range(0, 190, 4))
    kills = kill_and_resume(tmp_path, whole, moments)
    assert 15 < kills < len(moments), "the last ones are beyond the run's end"
