"""What the operating system says, as one sentence; and what it must not hide."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from fedkeel.errors import StoreError
from fedkeel.files import Unsealed, below, explained, seal, unseal, write_atomically, write_to_show


def full_disk() -> None:
    with explained(Path("here")):
        raise OSError(28, "No space left")


def test_an_error_of_the_system_is_one_sentence() -> None:
    with pytest.raises(StoreError, match="'here' cannot be written: No space left; make room"):
        full_disk()


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


def test_a_file_is_the_old_one_until_the_new_one_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def fsync(_: int) -> None:
        seen.append((tmp_path / "file").read_text())

    (tmp_path / "file").write_text("old")
    monkeypatch.setattr(os, "fsync", fsync)
    write_atomically(tmp_path / "file", b"new")
    assert seen == ["old"]
    assert (tmp_path / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


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
