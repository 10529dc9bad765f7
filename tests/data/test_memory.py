"""How much memory there is, on machines and in containers made up here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedkeel.data import load
from fedkeel.data import memory as room
from fedkeel.errors import DataError
from tests.data.readers.test_npz import write_parquet

GB = 10**9


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path_factory.mktemp("cache")))


def machine(root: Path, available_kb: int, groups: str, **files: object) -> tuple[Path, Path]:
    proc, cgroups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99 kB\nMemFree: 1 kB\nMemAvailable:   {available_kb} kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    cgroups.mkdir()
    for name, content in files.items():
        file = cgroups / name.replace("__", "/").replace("_DOT_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(content))
    return proc, cgroups


def test_without_a_container_it_is_what_the_machine_has(tmp_path: Path) -> None:
    assert room.available(*machine(tmp_path, 4000, "0::/\n")) == 4000 * 1024
    assert room.available(tmp_path / "none", tmp_path / "none") != 0


def test_a_limit_binds_less_what_is_used_and_files_that_are_only_kept_do_not_count(tmp_path: Path) -> None:
    files = {
        "a__b__memory_DOT_max": "max",
        "a__b__memory_DOT_current": 5,
        "a__memory_DOT_max": 1_000_000,
        "a__memory_DOT_current": 700_000,
        "a__memory_DOT_stat": "anon 600000\ninactive_file 100000\n",
    }
    assert room.available(*machine(tmp_path, 10**6, "0::/a/b\n", **files)) == 400_000


def test_a_container_that_sees_its_own_group_at_the_top(tmp_path: Path) -> None:
    files = {"memory_DOT_max": 1000, "memory_DOT_current": 400}
    assert room.available(*machine(tmp_path, 10**6, "0::/docker/of/the/host\n", **files)) == 600


def test_control_groups_of_the_first_version(tmp_path: Path) -> None:
    files = {
        "memory__x__memory_DOT_limit_in_bytes": 9_000,
        "memory__x__memory_DOT_usage_in_bytes": 10_000,
        "memory__memory_DOT_limit_in_bytes": 2**63 - 4096,
        "memory__memory_DOT_usage_in_bytes": 10_000,
    }
    assert room.available(*machine(tmp_path, 10**6, "5:cpu:/x\n4:hugetlb,memory:/x\n0::/\n", **files)) == 0


def test_what_fits_is_passed_and_what_does_not_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "available", lambda: 3 * GB)
    room.require(3 * GB, "The images", "give fewer")
    with pytest.raises(DataError, match=r"The images need 3\.5 GB of memory, and 3 GB are free: give fewer\."):
        room.require(3_500_000_000, "The images", "give fewer")
    monkeypatch.setattr(room, "available", lambda: None)
    room.require(10**30, "The images", "give fewer")


def test_a_pack_is_measured_by_what_is_in_it_not_by_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "pack.npz"
    np.savez_compressed(file, x_a=np.zeros((40, 100, 100), np.uint8), y_a=np.arange(40) % 2)
    assert file.stat().st_size < 40_000
    monkeypatch.setattr(room, "available", lambda: 700_000)
    with pytest.raises(DataError, match=r"The arrays of '.*pack\.npz' need 801 kB of memory, and 700 kB are free"):
        load("npz", root=file)
    monkeypatch.setattr(room, "available", lambda: 900_000)
    assert len(load("npz", root=file).images) == 40


def test_a_parquet_file_counts_whole_and_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    for part, count in (("train", 40), ("test", 10)):
        write_parquet(tmp_path / f"{part}.parquet", "img", count, 32)
    # All 50 images, once as each file has them and once together, and the 40 of the larger file.
    needed = (2 * 50 + 40) * 3 * 64 * 64
    monkeypatch.setattr(room, "available", lambda: needed - 1)
    with pytest.raises(DataError, match=r"The 50 images of 'cifar10' at 64 x 64 pixels need 1\.72 MB of memory"):
        load("cifar10", root=tmp_path, size=64)
    monkeypatch.setattr(room, "available", lambda: needed)
    assert len(load("cifar10", root=tmp_path, size=64).images) == 50
