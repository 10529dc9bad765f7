"""Decoded images on disk: one .npy file (N, H, W, 3) for each choice of images and size, which is mapped and never read
whole. The files lie in $FEDKEEL_CACHE, or else in ~/.cache/fedkeel, and may be deleted at any time.

A file is written aside and renamed when it is whole. With FEDKEEL_CACHE=off the images are decoded into memory.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedkeel.core.naming import file_name
from fedkeel.errors import DataError

Bytes = npt.NDArray[np.uint8]
Notes = dict[str, Any]  # what a person is told of the images, each time that they are used
DECODING = 4  # part of every key: a change of how images are decoded makes the old files stale


def folder() -> Path | None:
    """Where decoded images are kept, or None where they are not."""
    given = os.environ.get("FEDKEEL_CACHE", "")
    if given == "off":
        return None
    return Path(given).expanduser() if given else Path.home() / ".cache" / "fedkeel"


def stored(
    name: str, key: object, shape: tuple[int, ...], decode: Callable[[Notes], Iterator[Bytes]]
) -> tuple[Bytes, Notes]:
    """The images of this key, and the notes on them: as they are on disk, or else as `decode` gives them, a few at a
    time; it writes its notes into what it is given."""
    place, notes = folder(), Notes()
    if place is None:
        images, start = np.empty(shape, np.uint8), 0
        for some in decode(notes):
            images[start : start + len(some)] = some
            start += len(some)
        return images, notes
    digest = hashlib.sha256(json.dumps([DECODING, key]).encode()).hexdigest()[:24]
    file = place / f"{file_name(name)}-{digest}.npy"
    beside = file.with_suffix(".json")
    try:
        return np.load(file, mmap_mode="r"), json.loads(beside.read_text("utf-8"))
    except (OSError, ValueError):  # not there, or damaged: made again
        pass
    try:
        place.mkdir(parents=True, exist_ok=True)
        aside = write_aside(file, shape, decode(notes))
        beside.write_text(json.dumps(notes), "utf-8")
        os.replace(aside, file)
    except OSError as error:
        raise DataError(
            f"'{place}' cannot keep the decoded images of '{name}' ({error.strerror}): set FEDKEEL_CACHE to a folder "
            "that has room for them, or to 'off' to hold them in memory."
        ) from error
    return np.load(file, mmap_mode="r"), notes


def write_aside(file: Path, shape: tuple[int, ...], images: Iterator[Bytes]) -> Path:
    handle, aside = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            header = {"descr": "|u1", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(stream, header)
            for some in images:
                stream.write(some.tobytes())
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    return Path(aside)
