"""What the operating system says, as one sentence; and what it must not hide."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fedkeel import files as durable
from fedkeel.errors import StoreError
from fedkeel.files import Unsealed, below, explained, seal, unseal, write_atomically, write_to_show
from fedkeel.runs import live
from fedkeel.runs.store import Store
from tests import tiny


def test_a_file_where_a_folder_should_be_is_not_a_lack_of_room(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    for place in (tmp_path / "notes", tmp_path / "notes" / "run"):
        with pytest.raises(StoreError, match="a file is in its way: choose another directory"), explained(place):
            place.mkdir()


def full_disk() -> None:
    with explained(Path("here")):
        raise OSError(28, "No space left")


def interrupted() -> None:
    with explained(Path("here")):
        try:
            raise KeyboardInterrupt
        finally:
            raise OSError(9, "Bad file descriptor")


def test_an_error_of_the_system_is_one_sentence() -> None:
    with pytest.raises(StoreError, match="'here' cannot be written: No space left; make room"):
        full_disk()


def test_ctrl_c_stays_ctrl_c_where_cleaning_up_after_it_fails() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_a_sealed_table_says_when_any_bit_of_it_is_another() -> None:
    table = {"round": 3, "share": 0.1, "name": "ward/café", "best": {"accuracy": None}, "list": [1, 2]}
    data = seal(table)
    assert unseal(data) == table
    for place in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        try:
            found = unseal(bytes(flipped))
        except Unsealed:
            continue
        assert found == table, "what is read is what was written, or nothing is"
    for other in (b"", b"{}", b"[]", b"null", b"[" * 100_000, data[:-5]):
        with pytest.raises(Unsealed):
            unseal(other)


# -- a power cut -----------------------------------------------------------------------------------------------------
class Disk:
    """Remembers which names were brought to disk and which were only said to be there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.unsynced: set[str] = set()
        self.renamed = 0
        self._plain = {name: getattr(os, name) for name in ("replace", "rename", "fsync", "mkdir")}
        for name in ("replace", "rename"):
            monkeypatch.setattr(os, name, lambda *given, name=name, **named: self._move(name, *given, **named))
        monkeypatch.setattr(os, "fsync", self._fsync)
        monkeypatch.setattr(os, "mkdir", self._mkdir)

    def _move(self, name: str, source: Any, target: Any, **named: Any) -> None:
        inside = os.path.realpath(source)
        assert inside not in self.unsynced, f"'{source}' is put in its place before the names in it are on disk"
        self._plain[name](source, target, **named)
        self.renamed += 1
        if os.path.basename(target) != live.FILE:  # which only tells of this moment
            self.unsynced.add(os.path.dirname(os.path.realpath(target)))

    def _mkdir(self, path: Any, *given: Any, **named: Any) -> None:
        self._plain["mkdir"](path, *given, **named)
        self.unsynced.add(os.path.dirname(os.path.realpath(path)))

    def _fsync(self, descriptor: int) -> None:
        self._plain["fsync"](descriptor)
        self.unsynced.discard(os.path.realpath(f"/proc/self/fd/{descriptor}"))


def test_after_a_rename_the_folder_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    write_atomically(tmp_path / "file", b"1")
    assert disk.renamed == 1
    assert disk.unsynced == set()
    monkeypatch.setattr(durable, "sync", lambda _: None)
    write_atomically(tmp_path / "file", b"2")
    assert disk.unsynced, "or this test would see nothing"


def test_nothing_that_a_run_leaves_is_a_name_that_a_power_cut_could_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, plain = Disk(monkeypatch), Store.checkpoint
    seen: list[set[str]] = []

    def checkpoint(self: Store, *given: Any) -> None:
        plain(self, *given)
        seen.append(set(disk.unsynced))

    monkeypatch.setattr(Store, "checkpoint", checkpoint)
    tiny.run(tmp_path / "far" / "away" / "run", "fedbn", rounds=3)
    assert len(seen) == 3
    assert [*seen, disk.unsynced] == [set()] * 4
    assert disk.renamed > 8


def test_a_file_system_that_cannot_sync_a_folder_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.fsync

    def fsync(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(22, "Invalid argument")
        plain(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(tmp_path / "file", b"1")
    assert (tmp_path / "file").read_bytes() == b"1"


def test_what_is_written_to_be_looked_at_waits_for_no_disk_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    write_to_show(tmp_path / "status.json", b"{}")
    write_to_show(tmp_path / "gone" / "status.json", b"{}")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_folder_that_goes_while_runs_are_looked_for_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("b", "a", "checkpoint"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").touch()
    real = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path).name == "checkpoint":
            raise FileNotFoundError(path)
        return real(path)

    with monkeypatch.context() as context:
        context.setattr(os, "scandir", scandir)
        found = below(tmp_path, "config.toml")
    assert found == [tmp_path / "a" / "config.toml", tmp_path / "b" / "config.toml"]
