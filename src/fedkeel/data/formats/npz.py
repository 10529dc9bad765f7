"""Files of NumPy arrays, .npz: plain arrays only, written whole or not at all.

Decoded images are kept in such files between runs, in $FEDKEEL_CACHE or else in ~/.cache/fedkeel. That cache may be
deleted at any time, and a place that cannot be written to only costs the decoding again.
"""

import hashlib
import json
import logging
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedkeel.core.naming import file_name
from fedkeel.data import memory
from fedkeel.errors import DataError

log = logging.getLogger("fedkeel")

Arrays = dict[str, npt.NDArray[Any]]
DECODING = 2  # part of every key of the cache: a change of how images are decoded makes the old files stale


def read_arrays(path: Path) -> Arrays:
    """A file from anywhere: not a pickle, and not more than there is memory for."""
    problem = "it is no .npz file"
    try:
        if zipfile.is_zipfile(path):  # what else NumPy reads are single arrays and pickles
            with zipfile.ZipFile(path) as archive:
                content = sum(entry.file_size for entry in archive.infolist())
            enough = memory.holding(2 * content, f"The arrays of '{path}'", "store smaller images, or fewer")
            with enough, np.load(path, allow_pickle=False) as stored:  # twice: as stored, and with channels first
                return {key: stored[key] for key in stored.files}
    except DataError:  # a ValueError too
        raise
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        problem = str(error)
    raise DataError(f"'{path}' cannot be read as an .npz pack of plain arrays ({problem}): write it with np.savez.")


def write_arrays(file: Path, arrays: Arrays) -> None:
    """Under a temporary name and renamed, so that another process never sees half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]  # a keyword could be `allow_pickle`, says mypy
        os.replace(temporary, file)
    finally:
        Path(temporary).unlink(missing_ok=True)


def cache_folder() -> Path:
    given = os.environ.get("FEDKEEL_CACHE", "")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "fedkeel"


def fingerprint(file: Path) -> list[object]:
    """What identifies a file's content without reading it."""
    try:
        about = file.stat()
    except OSError:  # a link to nowhere is an image that cannot be decoded, no error here
        return [str(file), None, None]
    # The last one nobody can set: an image that was replaced by one of the same size and date is another.
    return [str(file), about.st_size, about.st_mtime_ns, about.st_ctime_ns]


def cached(name: str, key: object, build: Callable[[], Arrays]) -> Arrays:
    """The arrays that `build` makes for this key, from the cache when they are there."""
    digest = hashlib.sha256(json.dumps([DECODING, key]).encode()).hexdigest()[:24]
    file = cache_folder() / f"{file_name(name)}-{digest}.npz"
    try:
        with np.load(file, allow_pickle=False) as stored:
            return {entry: stored[entry] for entry in stored.files}
    except FileNotFoundError:
        pass
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        log.info("The cache file %s cannot be read (%s) and is made again.", file, error)
    arrays = build()
    try:
        write_arrays(file, arrays)
    except OSError as error:
        log.info("Decoded images are not kept: %s cannot be written (%s).", file, error)
    return arrays
