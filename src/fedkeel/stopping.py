"""How a run is asked to stop, and the named points on its way at which a test may look at it or end it."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOOK = 0.1  # seconds between two looks at the flag of one who waits


class Flag:
    """What handlers of signals may set, wherever they come: `threading.Event` takes a lock, on which a handler that
    comes while it is held waits for ever, and the next signal's handler inside of that one."""

    def __init__(self) -> None:
        self._up = False

    def is_set(self) -> bool:
        return self._up

    def set(self) -> None:
        self._up = True

    def clear(self) -> None:
        self._up = False

    def wait(self, seconds: float) -> bool:
        """Until it is set, for so many seconds at most; whether it is."""
        end = time.monotonic() + seconds
        while not self._up and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, LOOK))
        return self._up


stop_requested = Flag()  # set by Ctrl-C; looked at between two local steps

# Points that a run passes, each with the file that it is about, if any.
LOCAL_STEP = "in a local step"
UPDATE = "between an update and its aggregation"
EVALUATION = "in an evaluation"
WRITING = "while a file is written"
RENAMING = "before a rename"
RENAMED = "after a rename"

hook: Callable[[str, Path | None], None] | None = None
"""Only tests set it, in the process that runs; workers forked from there inherit it."""


class Stopped(Exception):
    """The run was asked to stop; what is checkpointed stays."""


def reached(point: str, path: Path | None = None) -> None:
    """Say that the run is here. Nobody listens but a test."""
    if hook is not None:
        hook(point, path)


@contextmanager
def undisturbed() -> Iterator[None]:
    """While inside, Ctrl-C and SIGTERM wait: for what must not be left half done, such as ending other processes."""
    if threading.current_thread() is not threading.main_thread():  # Python's handlers run in the main thread alone
        yield
        return
    came: list[int] = []

    def wait(number: int, _: object) -> None:
        came.append(number)

    present = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in present.items() if handler is not None}  # None: not Python's own
    try:
        for number in before:
            signal.signal(number, wait)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in dict.fromkeys(came):
            signal.raise_signal(late)
