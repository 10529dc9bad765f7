"""Decoded images are kept between runs, in $FEDKEEL_CACHE or else in ~/.cache/fedkeel.

A cache may be deleted at any time, and a place that cannot be written to only costs the decoding again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from fedkeel.core.naming import file_name
from fedkeel.data.formats.npz import Arrays, write_arrays

log = logging.getLogger("fedkeel")

# Part of every key: a change of how images are decoded makes the old files stale.
DECODING = 2


def cache_folder() -> Path:
    given = os.environ.get("FEDKEEL_CACHE", "")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "fedkeel"


def fingerprint(file: Path) -> list[object]:
    """What identifies a file's content without reading it."""
    try:
        about = file.stat()
    except OSError:  # a link to nowhere is an image that cannot be decoded, no error here
        return [str(file), None, None]
    return [str(file), about.st_size, about.st_mtime_ns]


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
