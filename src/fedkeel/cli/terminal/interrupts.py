"""Ctrl-C: the first one stops after the current step and keeps the run, the second one leaves at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fedkeel.stopping import Stopped, stop_requested

EXIT_CODE = 130  # as of a program that Ctrl-C ends


class Interrupted(Exception):
    """The user stopped a command; the message is the command that goes on from there."""


@contextmanager
def interruptible(go_on_with: str = "") -> Iterator[None]:
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
    except Stopped:
        raise Interrupted(go_on_with) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop_requested.clear()
