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


def stored(
    name: str, key: object, shape: tuple[int, ...], decode: Callable[[Notes], Iterator[Bytes]]
) -> tuple[Bytes, Notes]:
    """The images of this key, and the notes on them: as they are on disk, or else as `decode` gives them, a few at a
    time; it writes its notes into what it is given."""
    place, notes = os.environ.get("FEDKEEL_CACHE", ""), Notes()
    if place == "off":
        images, start = np.empty(shape, np.uint8), 0
        for some in decode(notes):
            images[start : (start := start + len(some))] = some
        return images, notes
    folder = Path(place).expanduser() if place else Path.home() / ".cache" / "fedkeel"
    digest = hashlib.sha256(json.dumps([DECODING, key]).encode()).hexdigest()[:24]
    file = folder / f"{file_name(name)}-{digest}.npy"
    beside = file.with_suffix(".json")
    try:
        return np.load(file, mmap_mode="r"), json.loads(beside.read_text("utf-8"))
    except (OSError, ValueError):  # not there, or damaged: made again
        pass
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=f".{file.stem}-", delete=False) as stream:
            try:
                header = {"descr": "|u1", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(stream, header)
                for some in decode(notes):
                    stream.write(some.tobytes())
            except BaseException:
                Path(stream.name).unlink()
                raise
        beside.write_text(json.dumps(notes), "utf-8")
        os.replace(stream.name, file)
    except OSError as error:
        raise DataError(
            f"'{folder}' cannot keep the decoded images of '{name}' ({error.strerror}): set FEDKEEL_CACHE to a folder "
            "that has room for them, or to 'off' to hold them in memory."
        ) from error
    return np.load(file, mmap_mode="r"), notes
