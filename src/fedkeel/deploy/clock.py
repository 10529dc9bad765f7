"""Clocks that differ, or are set while a run goes on.

Flower compares moments on two machines: a site signs the moment of each request, and the server takes signatures from
305 s ago to 5 s ahead, so that one that was seen cannot be used for long. Here that window stays as it is. But

- Flower's processes count on from the moment of their start, whatever the machine's clock is set to meanwhile;
- with each answer the server says what its clock says, over TLS, and a site signs by that clock and no longer by its
  own, as long as they differ by no more than `BORNE`: else a false server could collect signatures for a far future;
- both ends say how much the clocks differ.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedkeel.files import write_atomically

BORNE = 900.0  # seconds
TOLD = 5.0  # a smaller difference is not worth a word
MOST_CHANGES = 20
CLOCK, DIFFERENCE = "fedkeel-clock", "fedkeel-clock-difference"  # headers of an answer, and of a request
BASE, FILE = "FEDKEEL_CLOCK", "FEDKEEL_CLOCKS"  # variables of Flower's processes


def elapsed() -> float:
    """Seconds since the machine was started, asleep or awake: nobody can set that."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def install(base: float | None = None) -> float:
    """Have Flower, in this process, count on from now, or from where another process of this machine did."""
    from flwr.supercore import date

    start = time.time() - elapsed() if base is None else base

    class Steady(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Steady:
            return cls.fromtimestamp(start + elapsed(), tz)

    inner: Any = date  # all of Flower asks `date.now`, which asks this
    inner.datetime = SimpleNamespace(datetime=Steady, UTC=datetime.timezone.utc)
    return start


def install_given() -> None:
    """In a process of Flower's: as the process that started it."""
    install(float(os.environ[BASE]))


def now() -> float:
    """As Flower in this process has it."""
    from flwr.supercore import date

    return date.now().timestamp()


class ServerTime:
    """The server's clock, as far as its answers tell."""

    def __init__(self, own: Callable[[], float] = now) -> None:
        self._own = own
        self.ahead = 0.0  # of this machine's clock

    @property
    def is_borne(self) -> bool:
        return abs(self.ahead) <= BORNE

    def now(self) -> float:
        return self._own() - (self.ahead if self.is_borne else 0.0)

    def ask(self) -> Callable[[str | None], bool]:
        """To be called before a request; what it returns, with what the answer says: whether that was news.

        The server's moment lies between asking and hearing, so how far the clocks differ is known to within that.
        """
        asked = self._own()

        def heard(told: str | None) -> bool:
            theirs = number(told)
            if theirs is None:
                return False
            least, most = asked - theirs, self._own() - theirs
            if least <= self.ahead <= most:
                return False
            self.ahead = (least + most) / 2
            return True

        return heard


def number(text: str | None) -> float | None:
    with suppress(ValueError, TypeError):
        value = float(text)  # type: ignore[arg-type]
        return value if math.isfinite(value) and abs(value) < 1e12 else None
    return None


class Differences:
    """How far whose clock is ahead, in a file: a process of Flower's writes it, and Fedkeel's tells people."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[str, int] = {}
        self._stamp, self._changes, self._lock = 0, Counter[str](), threading.Lock()

    @staticmethod
    def given() -> Differences:
        """In a process of Flower's."""
        return Differences(Path(os.environ[FILE]))

    def write(self, who: str, ahead: float) -> None:
        """Nothing is written as long as nothing changes, nor for whom it changes all the time."""
        with self._lock:
            if abs(ahead - self._known.get(who, 0)) <= TOLD or self._changes[who] == MOST_CHANGES:
                return
            self._known[who] = round(ahead)
            self._changes[who] += 1
            with suppress(OSError):
                write_atomically(self._path, json.dumps(self._known).encode())

    def news(self) -> dict[str, int]:
        """Those that are in the file and were not at the last look."""
        try:
            stamp = self._path.stat().st_mtime_ns
            if stamp == self._stamp:
                return {}
            found = {str(who): int(ahead) for who, ahead in json.loads(self._path.read_bytes()).items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}
        new = {who: ahead for who, ahead in found.items() if ahead != self._known.get(who, 0)}
        self._stamp, self._known = stamp, found
        return new


def sentence(whose: str, ahead: int, than: str) -> str:
    """Of one clock and another."""
    if abs(ahead) <= TOLD:
        return f"{whose} agrees with {than} again."
    said = f"{whose} is {abs(ahead):,} s {'ahead of' if ahead > 0 else 'behind'} {than}"
    if abs(ahead) <= BORNE:
        return f"{said}: that is made up for, but set it right."
    return (
        f"{said}, and no more than {BORNE:g} s are borne: set the one that is wrong, until then nobody is let in by it."
    )
