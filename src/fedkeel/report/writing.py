"""What keeps a file of a report from being written, in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedkeel.errors import FedkeelError


@contextmanager
def told(path: Path, option: str) -> Iterator[None]:
    """`option` is the flag that names another place."""
    try:
        yield
    except OSError as error:
        problem = error.strerror or error
        raise FedkeelError(f"'{path}' cannot be written: {problem}; choose another place with {option}.") from error
