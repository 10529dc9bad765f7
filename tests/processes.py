"""Other processes, as tests see them."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from fedkeel import stopping

HANG = 300.0  # seconds: only turns a test that would wait for ever into one that fails


def needs_ray() -> None:
    """Skip where Ray itself cannot be started, which keeps objects in /dev/shm: none or a small one is no fault."""
    pytest.importorskip("ray")
    place = Path("/dev/shm")
    if not os.access(place, os.W_OK) or shutil.disk_usage(place).free < 256 << 20:
        pytest.skip("Ray has no room in /dev/shm", allow_module_level=True)


def until(true: Callable[[], object]) -> None:
    """Wait for something that happens sooner or later, on a machine of any speed."""
    limit = time.monotonic() + HANG
    while not true():
        assert time.monotonic() < limit, "it did not happen"
        time.sleep(0.01)


def state(pid: int) -> str:
    """As the kernel has it: R, S, T for one that is stopped; Z, or nothing, for one that is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def running(pid: int) -> bool:
    return state(pid) not in ("", "Z", "X")


def ended(pids: Iterable[int]) -> None:
    """Wait until all of them are gone."""
    until(lambda: not any(running(pid) for pid in pids))


def children(pid: int) -> list[int]:
    """Its own, as long as it lives."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid:
            found.append(int(folder.name))
    return found


def forked(act: Callable[[], int | None], output: Path | None = None) -> int:
    """Do it in a process of its own, which ends with what that returns; what it prints goes to a file."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        if output is not None:
            file = open(output, "w", buffering=1)  # noqa: SIM115 (as long as the process)
            sys.stdout = sys.stderr = file
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = act() or 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def exit_code(child: int) -> int:
    """Of a process that was forked here, once it has ended; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def wait_here(point: str, file: str, ready: Path) -> None:
    """From now on a run in this process waits at that point, once, until a signal comes; `ready` says that it is there.

    So a test can do something to a run of which it knows where it is, on a machine of any speed.
    """

    def hook(name: str, path: Path | None) -> None:
        if name == point and file in str(path) and not ready.exists():
            came = stopping.Flag()
            before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

            def pass_on(number: int, frame: Any) -> None:
                came.set()
                handler = before[signal.Signals(number)]
                assert callable(handler)
                handler(number, frame)

            for number in before:
                signal.signal(number, pass_on)
            ready.touch()
            came.wait(HANG)
            for number, handler in before.items():
                signal.signal(number, handler)

    stopping.hook = hook
