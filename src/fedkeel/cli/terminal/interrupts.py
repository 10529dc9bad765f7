"""Ctrl-C: the first one stops after the current step and keeps the run, the second one leaves at once."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fedkeel.stopping import stop_requested

EXIT_CODE = 130


@contextmanager
def interruptible() -> Iterator[None]:
    """While inside, SIGINT and SIGTERM ask the run to stop, see `fedkeel.stopping.stop_requested`."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        if stop_requested.is_set():
            raise KeyboardInterrupt
        stop_requested.set()
        # Not print(): the signal may have come in the middle of one.
        os.write(2, b"\nfedkeel: stopping after the current step; press Ctrl-C again to leave at once\n")

    stop_requested.clear()
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop_requested.clear()
