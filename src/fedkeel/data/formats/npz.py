"""Files of NumPy arrays, .npz: plain arrays only, written whole or not at all."""

import os
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedkeel.data import memory
from fedkeel.errors import DataError

Arrays = dict[str, npt.NDArray[Any]]


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


def fingerprint(file: Path) -> list[object]:
    """What identifies a file's content without reading it."""
    try:
        about = file.stat()
    except OSError:  # a link to nowhere is an image that cannot be decoded, no error here
        return [str(file), None, None]
    # The last one nobody can set: an image that was replaced by one of the same size and date is another.
    return [str(file), about.st_size, about.st_mtime_ns, about.st_ctime_ns]
