"""Files that survive what happens to a process and to a machine, and errors of the system as one sentence."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedkeel.errors import StoreError
from fedkeel.stopping import RENAMED, RENAMING, WRITING, reached


@contextmanager
def explained(path: Path, then: str = ", then resume") -> Iterator[None]:
    """Turn what the operating system says about a file into one sentence."""
    try:
        yield
    except OSError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, KeyboardInterrupt):  # Ctrl-C inside of `shutil.rmtree`, which then trips over itself
                raise KeyboardInterrupt from None
            cause = cause.__context__
        raise StoreError(
            f"'{error.filename or path}' cannot be written: {error.strerror or error}; "
            f"make room or choose another directory with --out{then}."
        ) from error


def write_durably(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        reached(WRITING, path)
        os.fsync(file.fileno())


def write_atomically(path: Path, data: bytes) -> None:
    """A reader sees the old file or the new one, never half of it."""
    aside = path.with_name(f".{path.name}.writing")
    write_durably(aside, data)
    reached(RENAMING, path)
    os.replace(aside, path)
    reached(RENAMED, path)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
