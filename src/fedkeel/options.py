"""What was given in Python where something else was expected, in words."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedkeel.errors import FedkeelError

LONGEST = 60


def described(thing: Any) -> str:
    """A few words for anything: a Federation printed in full would be a page of numbers.

    >>> described("fedavg"), described([1, 2]), described(dict), described(Path)
    ("'fedavg'", '[1, 2]', 'the class dict', 'the class Path')
    """
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    plain = thing is None or isinstance(thing, bool | int | float | str | bytes | list | tuple | dict | set)
    text = repr(thing) if plain else ""
    if plain and len(text) <= LONGEST and " object at 0x" not in text:
        return text
    kind = type(thing).__name__
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


def as_path(given: Any, what: str = "directory") -> Path:
    """A path that the system can be asked about."""
    if not isinstance(given, str | os.PathLike) or "\0" in os.fspath(given):
        raise FedkeelError(f"'{what}' is {described(given)}: give a path.")
    return Path(given)
