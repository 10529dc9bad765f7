"""Decoded images between runs: found again, mapped, limited, listed and cleared."""

from __future__ import annotations

import fcntl
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fedkeel.data import load
from fedkeel.data import memory as room
from fedkeel.data.formats import cache, images
from fedkeel.errors import DataError
from tests.data.made_up import tree
from tests.data.readers.test_npz import write_parquet


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tree(tmp_path / "images", ["art", "photo"], ["cat", "dog"], 8)


def kept() -> list[Path]:
    return [entry.file for entry in cache.entries()]


def test_images_on_disk_are_those_in_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, mapped = load("folder", root=root, size=6, keep="memory"), load("folder", root=root, size=7, keep="disk")
    assert (held.on_disk, mapped.on_disk) == (False, True)
    again = load("folder", root=root, size=6, keep="disk")  # the same file serves both
    assert again.on_disk
    assert again.images.equal(held.images)
    assert load("folder", root=root, size=7, keep="memory").images.equal(mapped.images)
    assert len(kept()) == 2
    monkeypatch.setattr(images, "decode", lambda *_: pytest.fail("an image was decoded again"))
    for size in (6, 7):
        for keep in ("memory", "disk"):
            assert load("folder", root=root, size=size, keep=keep).on_disk == (keep == "disk")


def test_runs_side_by_side_decode_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, decoded = images.decode, []

    def slowly(content: Path | bytes, *how: Any) -> images.Bytes:
        decoded.append(content)
        return whole(content, *how)

    monkeypatch.setattr(images, "decode", slowly)
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(load, "folder", root=root, size=6, keep="disk") for _ in range(4)]
    assert all(run.result().on_disk for run in runs)
    assert len(decoded) == 32


def test_images_on_disk_are_never_all_in_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_in_memory", lambda *_: pytest.fail("all images in memory"))
    assert len(load("folder", root=root, size=6, keep="disk").images) == 32


def test_what_takes_too_much_of_the_free_memory_stays_on_disk(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    needed = 32 * 3 * 10 * 10
    monkeypatch.setattr(room, "available", lambda: 2 * needed)
    assert not load("folder", root=root, size=10).on_disk
    monkeypatch.setattr(room, "available", lambda: 2 * needed - 2)
    with caplog.at_level(logging.WARNING, "fedkeel"):
        assert load("folder", root=root, size=10).on_disk
    assert "The 32 images of 'folder' at 10 x 10 pixels take 9.6 kB, and 19.2 kB of memory are free" in caplog.text
    assert not load("folder", root=root, size=10, keep="memory").on_disk


def test_where_the_disk_has_no_room_memory_that_has_it_is_taken(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 32 * 3 * 10 * 10
    monkeypatch.setattr(room, "available", lambda: needed)
    monkeypatch.setenv("FEDKEEL_CACHE_LIMIT", "2 kB")
    assert not load("folder", root=root, size=10).on_disk
    monkeypatch.setattr(room, "available", lambda: 32 * 3 * 9 * 9)
    # The size that would fit is named: 9 in memory.
    with pytest.raises(DataError, match=r"need 9.6 kB: 7.78 kB of memory are free, and .* 2 kB; give size=9 or a"):
        load("folder", root=root, size=10)
    monkeypatch.setenv("FEDKEEL_CACHE", "off")
    with pytest.raises(DataError, match=r"FEDKEEL_CACHE=off; give size=9 or a smaller size"):
        load("folder", root=root, size=10)
    with pytest.raises(DataError, match=r"9.6 kB of memory, and 7.78 kB are free: give size=9 .*, or keep=disk"):
        load("folder", root=root, size=10, keep="memory")


def test_images_that_are_to_stay_on_disk_need_a_place_there(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot be written \(.*\); give keep=memory\."):
        load("folder", root=root, size=10, keep="disk")


@pytest.mark.parametrize(("options", "given"), [({"keep": "disk"}, "keep=disk"), ({"tolerate": 0.5}, "tolerate=0.5")])
def test_what_is_for_image_files_is_refused_for_larger_ones(
    tmp_path: Path, options: dict[str, Any], given: str
) -> None:
    pytest.importorskip("pyarrow")
    for part in ("train", "test"):
        write_parquet(tmp_path / f"{part}.parquet", "img", 10, 32)
    with pytest.raises(DataError, match=f"{given} is for image files, and 'cifar10' has its images in larger ones"):
        load("cifar10", root=tmp_path, **options)


def test_a_file_that_was_not_finished_is_not_taken_for_one(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, calls = images.decode, []

    def killed(content: Path | bytes, *how: Any) -> images.Bytes:
        calls.append(content)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return whole(content, *how)

    monkeypatch.setattr(images, "decode", killed)
    with pytest.raises(KeyboardInterrupt):
        load("folder", root=root, size=6, keep="disk")
    assert kept() == []  # what is interrupted cleans up; what is killed leaves the part
    monkeypatch.setattr(images, "decode", whole)
    first = load("folder", root=root, size=6, keep="disk").images
    (file,) = kept()
    part = file.with_name(f".{file.stem}-abc123.part")
    file.rename(part)
    assert load("folder", root=root, size=6, keep="disk").images.equal(first)
    assert {path.suffix for path in kept()} == {".npy"}, "what was killed makes way"


def test_half_a_file_is_made_again(root: Path) -> None:
    for keep in ("disk", "memory"):
        first = load("folder", root=root, size=6, keep=keep).images.clone()
        (file,) = kept()
        for length in (0, 50, 1000, file.stat().st_size - 1):
            os.truncate(file, length)
            assert load("folder", root=root, size=6, keep=keep).images.equal(first)


def test_the_cache_can_be_switched_off(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache.cache_folder()
    assert folder is not None
    monkeypatch.setenv("FEDKEEL_CACHE", "off")
    assert len(load("folder", root=root).images) == 32
    assert list(folder.iterdir()) == []


def test_a_limit_lets_those_go_first_that_were_not_used_for_longest(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for size in (10, 11, 12):
        load("folder", root=root, size=size)
    old = {file.stat().st_size: file for file in kept()}
    for age, (_, file) in enumerate(sorted(old.items())):
        os.utime(file, (1000 + age, 1000 + age))
    load("folder", root=root, size=10)  # the oldest is used again
    first, second, third = (file for _, file in sorted(old.items()))
    monkeypatch.setenv("FEDKEEL_CACHE_LIMIT", f"{first.stat().st_size + third.stat().st_size + 15_000}B")
    load("folder", root=root, size=7)
    assert (first.exists(), second.exists(), third.exists()) == (True, False, True)


@pytest.mark.parametrize("limit", ["lots", "20 Gigs", "5iB", "-1"])
def test_a_limit_that_is_none_is_told_before_an_image_is_decoded(
    root: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(images, "decode", lambda *_: pytest.fail("an image was decoded"))
    monkeypatch.setenv("FEDKEEL_CACHE_LIMIT", limit)
    with pytest.raises(DataError, match=f"FEDKEEL_CACHE_LIMIT is '{limit}': give a size, such as 500MB, 20GB or 20GiB"):
        load("folder", root=root)


@pytest.mark.parametrize(
    ("text", "size"),
    [("500", 500), ("1.5 kB", 1500), ("1KB", 1000), ("3KiB", 3072), ("20gb", 20 * 10**9), ("2T", 2 * 10**12)],
)
def test_a_limit_is_read_with_its_unit(monkeypatch: pytest.MonkeyPatch, text: str, size: int) -> None:
    monkeypatch.setenv("FEDKEEL_CACHE_LIMIT", text)
    assert cache.limit() == size


def test_only_our_own_files_are_cleared(root: Path) -> None:
    load("folder", root=root, size=6)
    folder = kept()[0].parent
    for name in ("photo.npy", "thesis-2020.npz", "folder.txt"):
        (folder / name).write_text("somebody's")
    being_written, abandoned = (folder / f".table-{digit * 24}-x1.part" for digit in "01")
    for file in (being_written, abandoned):
        file.write_text("half")
    lock = being_written.open("rb")
    fcntl.flock(lock, fcntl.LOCK_EX)
    with pytest.raises(DataError, match="no data set in the cache named 'pacs'"):
        cache.clear("pacs")
    assert [entry.name for entry in cache.clear("table")] == ["table"]
    assert being_written.exists()
    assert cache.entries()[-1].about() == f"32 images at 6 x 6 of {root}"
    assert [entry.name for entry in cache.clear()] == ["folder"]
    left = ["photo.npy", "thesis-2020.npz", "folder.txt", being_written.name]
    assert sorted(path.name for path in folder.iterdir()) == sorted(left)
    lock.close()  # as when the process is killed
    assert len(cache.clear()) == 1


def test_a_person_is_told_once_where_images_are_kept(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache, "TOLD_FROM", 1)
    with caplog.at_level(logging.WARNING, "fedkeel"):
        for size in (5, 6):
            load("folder", root=root, size=size)
    (told,) = caplog.messages
    assert told.startswith(f"Decoded images are kept for the next run in '{cache.cache_folder()}', 2.4 kB now: ")
    assert all(word in told for word in ("fedkeel data cache", "--no-cache", "FEDKEEL_CACHE_LIMIT"))


def test_what_was_tolerated_once_is_refused_by_a_stricter_reader(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2):
        (root / "art" / "cat" / f"00{number}.png").write_text("broken")
    with pytest.raises(DataError, match=r"2 of the 32 images .* more than 1 %.*tolerate=0.063 \(--tolerate 0.063\)"):
        load("folder", root=root)
    assert kept() == []
    for keep in ("disk", "memory"):
        assert len(load("folder", root=root, tolerate=0.063, keep=keep).images) == 30
    assert "2 of the 32 images of 'folder' are left out" in caplog.text
    with pytest.raises(DataError, match="more than 5 %"):
        load("folder", root=root, tolerate=0.05)
