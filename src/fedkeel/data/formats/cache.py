"""Decoded images, kept between runs: in $FEDKEEL_CACHE, or else in ~/.cache/fedkeel; FEDKEEL_CACHE=off keeps none.

A file begins with the images as a plain .npy array, so that it can be mapped: images that memory has no room for are
read from there as they are needed. What could be decoded, and why the rest could not, follows. A file is written under
another name and renamed when it is whole. The cache may be deleted at any time, and a place that cannot be written to
only costs the decoding again.
"""

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedkeel.core.naming import file_name
from fedkeel.data import memory
from fedkeel.data.population import IntArray
from fedkeel.errors import DataError, unknown

log = logging.getLogger("fedkeel")

Bytes = npt.NDArray[np.uint8]
DECODING = 3  # part of every key: a change of how images are decoded makes the old files stale
OWN = re.compile(r"\.?(?P<name>.+)-[0-9a-f]{24}(\.npz|\.npy|-\w+\.part)")
TAG = "CACHEDIR.TAG"  # by which programs that make backups know that there is nothing to save
TOLD_FROM = 10**6  # bytes of a file that a person is told of


class NoRoom(DataError):
    """Images cannot stay on disk, for the reason given; there are `room` bytes."""

    def __init__(self, reason: str, room: int = 0) -> None:
        super().__init__(reason)
        self.room = room


class Decoded(NamedTuple):
    images: Bytes  # (n, 3, size, size), of those that could be decoded
    kept: IntArray  # which ones of all these are
    problems: Sequence[str]  # why each of the others could not be, and what else is to be told


Build = Callable[[Bytes], tuple[IntArray, Sequence[str]]]
"""Fills the first places of the array that it is given: which images are there, and what is wrong with the others."""


@dataclass(frozen=True)
class Entry:
    """A file of the cache."""

    file: Path
    name: str  # of the data set
    size: int
    used: float  # when it was last read, in seconds since 1970

    @property
    def unfinished(self) -> bool:
        return self.file.suffix == ".part"

    def about(self) -> str:
        """Where its images come from, how many they are and how large."""
        if self.unfinished:
            return "half written"
        try:
            with _open(self.file) as (_, shape, rest):
                text = str(np.load(rest)[0])
                return f"{shape[0]:,} images at {shape[-2]} x {shape[-1]} of {text}"
        except (OSError, ValueError, EOFError, IndexError):
            return "of another version of Fedkeel"


def cache_folder() -> Path | None:
    """Where decoded images are kept, or None where they are not."""
    given = os.environ.get("FEDKEEL_CACHE", "")
    if given == "off":
        return None
    return Path(given).expanduser() if given else Path.home() / ".cache" / "fedkeel"


def entries() -> list[Entry]:
    """What is in the cache, that which was used last first. Files of other programs are none of ours."""
    found, folder = [], cache_folder()
    for file in sorted(folder.iterdir()) if folder and folder.is_dir() else ():
        own = OWN.fullmatch(file.name)
        with suppress(OSError):  # gone in the meantime
            if own and file.is_file():
                about = file.stat()
                found.append(Entry(file, own["name"], about.st_size, about.st_mtime))
    return sorted(found, key=lambda entry: -entry.used)


def clear(name: str = "") -> list[Entry]:
    """Delete what is kept of a data set, or everything; what another process is writing now stays."""
    there = entries()
    if name and name not in {entry.name for entry in there}:
        raise DataError(unknown("data set in the cache", name, {entry.name for entry in there}))
    gone = [entry for entry in there if name in ("", entry.name) and not _being_written(entry)]
    for entry in gone:
        entry.file.unlink(missing_ok=True)
    return gone


def stored(name: str, key: object, shape: tuple[int, ...], build: Build, *, about: str, on_disk: bool) -> Decoded:
    """The images that `build` makes for this key, from the cache when they are there; `on_disk`, they stay there.

    `about` says where they come from, for people who look into the cache.
    """
    folder, _ = cache_folder(), limit()  # a limit that is none is told before anything is decoded
    if folder is None:
        if on_disk:
            raise NoRoom("nothing is kept on disk with --no-cache and FEDKEEL_CACHE=off")
        return _in_memory(shape, build)
    digest = hashlib.sha256(json.dumps([DECODING, key]).encode()).hexdigest()[:24]
    file = folder / f"{file_name(name)}-{digest}.npy"
    try:
        found = _read(file, on_disk=on_disk)
        with suppress(OSError):
            os.utime(file)  # those that were not used for longest go first
        return found
    except FileNotFoundError:
        pass
    except (OSError, ValueError, EOFError) as error:
        log.info("The cache file %s cannot be read (%s) and is made again.", file, error)
        with suppress(OSError):
            file.unlink(missing_ok=True)
    if on_disk:
        try:
            with _alone(folder):
                if not file.exists():
                    _write(file, shape, build, about)
                return _read(file, on_disk=True)
        except OSError as error:
            raise NoRoom(f"'{folder}', or what FEDKEEL_CACHE says, cannot be written ({error.strerror})") from error
    made = _in_memory(shape, build)

    def copy(images: Bytes) -> tuple[IntArray, Sequence[str]]:
        images[: len(made.kept)] = made.images
        return made.kept, made.problems

    try:
        _write(file, shape, copy, about)
    except (OSError, NoRoom) as error:
        log.info("Decoded images are not kept: %s cannot be written (%s).", file, error)
    return made


def limit() -> int | None:
    """$FEDKEEL_CACHE_LIMIT in bytes."""
    given = os.environ.get("FEDKEEL_CACHE_LIMIT", "").strip()
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:([KMGT])(I?))?B?", given.upper())
    if given and match is None:
        raise DataError(f"FEDKEEL_CACHE_LIMIT is '{given}': give a size, such as 500MB, 20GB or 20GiB.")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ")) if match else None


def _in_memory(shape: tuple[int, ...], build: Build) -> Decoded:
    images = np.empty(shape, np.uint8)
    kept, problems = build(images)
    return Decoded(images[: len(kept)], kept, problems)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Runs side by side that want the same images wait for one that makes them: there is no room for several."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        _lock(handle)
        yield
    finally:
        os.close(handle)


def _lock(handle: int) -> None:
    with suppress(OSError):  # not every file system has locks
        fcntl.flock(handle, fcntl.LOCK_EX)


@contextmanager
def _open(file: Path) -> Iterator[tuple[int, tuple[int, ...], BufferedReader]]:
    with file.open("rb") as stream:
        np.lib.format.read_magic(stream)
        shape, _, _ = np.lib.format.read_array_header_1_0(stream)
        start = stream.tell()
        stream.seek(start + math.prod(shape))
        yield start, shape, stream


def _read(file: Path, *, on_disk: bool) -> Decoded:
    with _open(file) as (start, shape, rest):
        texts, kept = np.load(rest), np.load(rest)
        if on_disk:
            images: Bytes = np.memmap(file, np.uint8, "r", start, shape)
        else:
            rest.seek(start)
            images = np.fromfile(rest, np.uint8, math.prod(shape)).reshape(shape)
    return Decoded(images[: len(kept)], kept, texts[1:].tolist())


def _write(file: Path, shape: tuple[int, ...], build: Build, about: str) -> None:
    """A kill half way leaves a file that nobody takes for a whole one."""
    size = math.prod(shape)
    file.parent.mkdir(parents=True, exist_ok=True)
    _make_room(file.parent, size)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}-", suffix=".part")
    try:
        with os.fdopen(handle, "r+b") as stream:
            _lock(stream.fileno())
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(stream, header)
            stream.flush()
            start = stream.tell()
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(stream.fileno(), 0, start + size)  # a full disk is an error here and a crash later
            else:
                os.ftruncate(stream.fileno(), start + size)
            images = np.memmap(stream, np.uint8, "r+", start, shape)
            kept, problems = build(images)
            images.flush()
            stream.seek(0, os.SEEK_END)
            np.save(stream, np.array([about, *problems], np.str_))
            np.save(stream, kept)
        os.replace(temporary, file)
    finally:
        Path(temporary).unlink(missing_ok=True)
    _tell_once(file.parent, size)


def _make_room(folder: Path, size: int) -> None:
    """Delete what was abandoned, and of the others those that were not used for longest, until there is room."""
    most = limit()
    if most is not None and size > most:
        raise NoRoom(f"FEDKEEL_CACHE_LIMIT allows {memory.size(most)}", most)
    total = size
    for entry in entries():
        total += entry.size
        if (entry.unfinished or (most is not None and total > most)) and not _being_written(entry):
            entry.file.unlink(missing_ok=True)
            total -= entry.size
    if size > (free := shutil.disk_usage(folder).free):
        raise NoRoom(f"{memory.size(free)} are free in '{folder}'", free)


def _being_written(entry: Entry) -> bool:
    """By the lock that whoever writes it has; a process that was killed has none."""
    try:
        with entry.file.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
    except OSError:
        return entry.unfinished


def _tell_once(folder: Path, size: int) -> None:
    tag = folder / TAG
    if size < TOLD_FROM or tag.exists():
        return
    with suppress(OSError):
        tag.write_text("Signature: 8a477f597d28d172789f06886806bc55\n")
        log.warning(
            "Decoded images are kept for the next run in '%s', %s now: 'fedkeel data cache' lists and clears them, "
            "--no-cache keeps none, FEDKEEL_CACHE_LIMIT=20GB sets a limit.",
            folder,
            memory.size(size),
        )
