"""The shelf: versions that checkpoints refer to, and a run that is killed between any two of its writes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeel.engine import memory_files as module
from fedkeel.engine.memory_files import Damaged, MemoryFiles, Reference
from fedkeel.errors import StoreError
from tests import tiny


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([value])}


def values(shelf: MemoryFiles) -> dict[str, float]:
    return {client: float(shelf.get(client)["x"]) for client in shelf}


def files(folder: Path, kind: str = "safetensors") -> list[str]:
    return sorted(path.name for path in folder.glob(f"*.{kind}"))


def reopened(folder: Path, reference: Reference, round: int = 0, others: tuple[Reference, ...] = ()) -> MemoryFiles:
    shelf = MemoryFiles(folder)
    shelf.check(reference)
    shelf.restore(reference, round, others)
    return shelf


def test_nothing_remembered_is_nothing_written(tmp_path: Path) -> None:
    shelf = MemoryFiles(tmp_path / "memory")
    reference = shelf.commit(0)
    shelf.release(0)
    assert not (tmp_path / "memory").exists()
    assert values(reopened(tmp_path / "memory", reference)) == {}


def test_each_commit_can_be_gone_back_to_as_long_as_it_is_kept(tmp_path: Path) -> None:
    shelf = MemoryFiles(tmp_path)
    shelf.put("a", tensors(1))
    shelf.put("b", tensors(2))
    first = shelf.commit(0)
    shelf.put("a", tensors(10))
    shelf.forget("b")
    shelf.put("c", tensors(3))
    second = shelf.commit(1)
    shelf.release(0)  # the checkpoint of round 0 is still there
    assert values(shelf) == {"a": 10, "c": 3}
    assert len(files(tmp_path)) == 4
    for reference, expected in ((first, {"a": 1, "b": 2}), (second, {"a": 10, "c": 3})):
        look = MemoryFiles(tmp_path).as_of(reference)  # without going back
        assert {client: float(look(client)["x"]) for client in "abc" if look(client)} == expected
    assert values(reopened(tmp_path, second, 1, (first,))) == {"a": 10, "c": 3}
    assert values(reopened(tmp_path, first)) == {"a": 1, "b": 2}


def test_versions_go_when_no_checkpoint_speaks_of_them(tmp_path: Path) -> None:
    shelf = MemoryFiles(tmp_path)
    for round in range(6):
        shelf.put("always", tensors(round))
        if round == 0:
            shelf.put("once", tensors(-1))
        shelf.commit(round)
        shelf.release(max(0, round - 1))
        assert len(files(tmp_path)) == min(round + 1, 2) + 1
    assert values(shelf) == {"once": -1, "always": 5}


def test_a_version_that_was_never_committed_goes_at_once(tmp_path: Path) -> None:
    shelf = MemoryFiles(tmp_path)
    for value in range(3):
        shelf.put("a", tensors(value))
    assert len(files(tmp_path)) == 1


def test_what_a_killed_run_left_is_removed_and_its_numbers_are_not_used_again(tmp_path: Path) -> None:
    shelf = MemoryFiles(tmp_path)
    shelf.put("a", tensors(1))
    first = shelf.commit(0)
    shelf.put("a", tensors(2))
    shelf.put("b", tensors(3))
    second = shelf.commit(1)
    shelf.put("b", tensors(4))  # and here it is killed
    again = reopened(tmp_path, second, 1, (first,))
    assert len(files(tmp_path)) == 3
    assert values(again) == {"a": 2, "b": 3}
    again.put("c", tensors(5))
    assert files(tmp_path)[-1] == "00000004.safetensors"
    third = again.commit(2)
    again.release(1)  # round 0 is gone, and with it the first version of a
    assert files(tmp_path) == ["00000001.safetensors", "00000002.safetensors", "00000004.safetensors"]
    assert values(reopened(tmp_path, third, 2, (second,))) == {"a": 2, "b": 3, "c": 5}


def test_a_commit_writes_what_changed(tmp_path: Path) -> None:
    shelf = MemoryFiles(tmp_path)
    for number in range(500):
        shelf.put(f"client {number}", tensors(number))
    before = shelf.commit(0)
    shelf.put("client 7", tensors(-7))
    after = shelf.commit(1)
    assert after["since"] == before["bytes"]
    assert after["bytes"] - before["bytes"] < 80
    assert shelf.commit(2) == after


def test_a_long_index_is_begun_anew_and_the_old_one_goes_with_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SPARE_LINES", 4)
    shelf = MemoryFiles(tmp_path)
    shelf.put("still", tensors(-1))
    references: list[Reference] = []
    for round in range(40):
        shelf.put("a", tensors(round))
        references.append(shelf.commit(round))
        shelf.release(max(0, round - 1))
        for reference, value in zip(references[-2:], range(max(0, round - 1), round + 1), strict=True):
            other = MemoryFiles(tmp_path)
            other.check(reference)
            other._begin(other._replay(reference)[0])
            assert values(other) == {"still": -1, "a": value}
        assert len(files(tmp_path, "jsonl")) <= 2
    assert len({reference["file"] for reference in references}) > 3
    resumed = reopened(tmp_path, references[-1], 39, (references[-2],))
    assert values(resumed) == {"still": -1, "a": 39}
    resumed.put("a", tensors(40))
    resumed.commit(40)
    resumed.release(39)
    assert len(files(tmp_path)) == 3  # still, and a of rounds 39 and 40


def test_damage_is_noticed_before_a_run_goes_on_or_at_the_latest_when_it_is_read(tmp_path: Path) -> None:
    shelf = MemoryFiles(tmp_path)
    shelf.put("old", tensors(1))
    shelf.commit(0)
    shelf.put("new", tensors(2))
    reference = shelf.commit(1)
    newest, oldest = (tmp_path / name for name in reversed(files(tmp_path)))
    intact = newest.read_bytes()
    newest.write_bytes(intact[:-1] + b"?")
    with pytest.raises(Damaged, match="checksum"):
        MemoryFiles(tmp_path).check(reference)
    newest.write_bytes(intact)
    oldest.write_bytes(intact)
    resumed = reopened(tmp_path, reference)
    with pytest.raises(StoreError, match="What the client 'old' remembers cannot be read") as caught:
        resumed.get("old")
    assert "\n" not in str(caught.value)
    oldest.unlink()
    with pytest.raises(Damaged, match="is missing"):
        MemoryFiles(tmp_path).check(reference)


# -- killed between any two writes ---------------------------------------------------------------------------
OPTIONS: dict[str, Any] = {"rounds": 4, "participation": 0.7, "memory_limit": 0}


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
    options = {**OPTIONS, "memory_limit": 1000}
    return tiny.result(tiny.run(tmp_path_factory.mktemp("whole") / "run", "fedbn", **options))


@pytest.mark.slow
def test_killed_between_two_writes_and_resumed_it_is_the_same_run(tmp_path: Path, whole: dict[str, bytes]) -> None:
    moments = list(range(0, 190, 4))
    kills = kill_and_resume(tmp_path, whole, moments)
    assert 15 < kills < len(moments), "the last ones are beyond the run's end"
