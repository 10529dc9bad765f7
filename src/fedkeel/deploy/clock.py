"""Clocks that differ, or are set while a run goes on.

Flower compares moments on two machines: a site signs the moment of each request, and the server takes signatures from
305 s ago to 5 s ahead, so that one that was seen cannot be used for long. Here that window stays as it is. But

- Flower's processes count on from the moment of their start, whatever the machine's clock is set to meanwhile;
- with each answer the server says what its clock says, over TLS, and a site signs by that clock and no longer by its
  own, as long as they differ by no more than `BORNE`: else a false server could collect signatures for a far future;
- both ends say how much the clocks differ.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from fedkeel.deploy import flower_internals
from fedkeel.files import write_atomically

BORNE = 900.0  # seconds
WORTH_A_WORD = 5.0
MOST_CHANGES = 20
CLOCK, DIFFERENCE = "fedkeel-clock", "fedkeel-clock-difference"  # headers of an answer, and of a request
BASE, FILE = "FEDKEEL_CLOCK", "FEDKEEL_CLOCKS"  # variables of Flower's processes


def elapsed() -> float:
    """Seconds since the machine was started, asleep or awake: nobody can set that."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def install() -> float:
    """Have Flower, in this process, count on from now; in a process of Flower's, as the one that started it does."""
    start = float(os.environ.get(BASE, time.time() - elapsed()))
    flower_internals.use_clock(lambda: start + elapsed())
    return start


def number(text: str | bytes | None) -> float | None:
    with suppress(ValueError, TypeError):
        value = float(text)  # type: ignore[arg-type]
        return value if math.isfinite(value) and abs(value) < 1e12 else None
    return None


class Differences:
    """How far whose clock is ahead, in a file: a process of Flower's, which is told where, writes it, and Fedkeel's
    tells people."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or Path(os.environ[FILE])
        self._known: dict[str, int] = {}
        self._changes, self._lock = Counter[str](), threading.Lock()

    def write(self, who: str, ahead: float) -> None:
        """Nothing is written as long as nothing changes, nor for whom it changes all the time."""
        with self._lock:
            if abs(ahead - self._known.get(who, 0)) <= WORTH_A_WORD or self._changes[who] == MOST_CHANGES:
                return
            self._known[who] = round(ahead)
            self._changes[who] += 1
            with suppress(OSError):
                write_atomically(self._path, json.dumps(self._known).encode())

    def news(self) -> dict[str, int]:
        """Those that are in the file and were not at the last look."""
        try:
            found = {str(who): int(ahead) for who, ahead in json.loads(self._path.read_bytes()).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}
        new = {who: ahead for who, ahead in found.items() if ahead != self._known.get(who, 0)}
        self._known = found
        return new


def sentence(whose: str, ahead: int, than: str) -> str:
    if abs(ahead) <= WORTH_A_WORD:
        return f"{whose} agrees with {than} again."
    said = f"{whose} is {abs(ahead):,} s {'ahead of' if ahead > 0 else 'behind'} {than}"
    if abs(ahead) <= BORNE:
        return f"{said}: that is made up for, but set it right."
    return (
        f"{said}, and no more than {BORNE:g} s are borne: set the one that is wrong, until then nobody is let in by it."
    )
