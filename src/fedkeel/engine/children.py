"""Processes that work for this one: the executor's workers, and the runs of a comparison.

Each has a pipe to the process that started it, and a heart: a thread that counts in memory that both share, whatever
else the process does. So one that works for long, which is nobody's guess, is told from one that hangs: stopped, or
stuck in the system, it no longer counts. The same thread ends the process when the one that started it is gone.

Processes are forked: they share all that is in memory, the images and methods that were never put into a module. CUDA
allows no fork; then each is a new Python that imports the main script, and it has no heart that could be seen.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from fedkeel.core import imports
from fedkeel.errors import ShortageError, death, shortage
from fedkeel.stopping import undisturbed

TICK = 0.2  # seconds, after which the parent looks around even if nobody has said anything
BEAT = 0.5  # seconds between two beats
AGAIN = 10.0  # seconds after which a process that was asked to stop is asked once more
PATIENCE = 60.0  # seconds without one, as the watching process has felt them
LINGER = 20.0  # seconds that a process which has hung up may take to be gone
LOOK = 1.0  # seconds that one look counts at most
HUNG = "hung and was ended"
LACKING = b"lacking memory: "
NAME = "fedkeel job"
UNGUARDED = 83  # exit code of a process whose main script would start everything once more
SENTENCE = (
    "Runs that share a GPU are processes of their own, and each imports your script again: put the call under "
    "'if __name__ == \"__main__\":', or give jobs=1."
)


class Child:
    """A process that does `work(pipe, *arguments)` with one thread; Ctrl-C is its parent's to handle.

    `fewer` is the option that would leave it more memory. `became` says what became of it, once it has ended.
    """

    def __init__(
        self,
        work: Callable[..., None],
        *arguments: Any,
        fewer: str,
        name: str | None = None,
        daemon: bool = False,
        spawned: bool = False,
    ) -> None:
        context: Any = multiprocessing.get_context("spawn" if spawned else "fork")
        self.pipe, theirs = context.Pipe()
        self.heart = None if spawned else Heart()
        self.process: BaseProcess = context.Process(
            target=_live, args=(self.heart, work, theirs, *arguments), name=name, daemon=daemon
        )
        self.fewer, self.became = fewer, ""
        self._asked: list[float] = []  # when
        with _main_that_can_be_imported(), undisturbed():
            self.process.start()
        theirs.close()

    def ask_to_stop(self) -> None:
        """SIGTERM, however often this is called: one, and a second `AGAIN` later, if the first came too early."""
        now = time.monotonic()
        if not self._asked or (len(self._asked) == 1 and now - self._asked[0] >= AGAIN):
            self._asked.append(now)
            self.process.terminate()


def _live(heart: Heart | None, work: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        if heart is not None:
            heart.start()
        work(pipe, *arguments)
    except (MemoryError, RuntimeError) as error:
        if not (lack := shortage(error)):
            raise
        with suppress(OSError):  # the parent is gone
            pipe.send_bytes(LACKING + lack.encode())


def heard(children: Collection[Child]) -> Iterator[tuple[Child, bytes | None]]:
    """What these say within a moment; None of one that says nothing any more, because it died or was ended here.

    One that lacks memory for what it has to do is an error here, with the sentence that says so.
    """
    ready = wait([child.pipe for child in children], timeout=TICK)
    for child in children:
        if child.pipe in ready:
            try:
                said = child.pipe.recv_bytes()
            except (EOFError, OSError):
                said = None
                child.process.join(timeout=LINGER)  # what it dies of by itself
                end([child])
                child.became = death(child.process.exitcode, child.fewer)
            if said and said.startswith(LACKING):
                raise ShortageError(said.removeprefix(LACKING).decode())
            yield child, said
        elif child.heart is not None and child.heart.is_silent():
            end([child])
            child.became = HUNG
            yield child, None


def end(children: Collection[Child]) -> None:
    """At once: one that hangs hears nothing else, and none has anything to put in order."""
    with undisturbed():
        for child in children:
            child.process.kill()
        for child in children:
            child.process.join(timeout=5)
            child.pipe.close()


class Heart:
    """Beats in one process and is looked at in the one that it was forked from."""

    def __init__(self, patience: float = PATIENCE, clock: Callable[[], float] = time.monotonic) -> None:
        self._beats = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
        self._watcher = os.getpid()
        self._patience, self._clock = patience, clock
        self._seen, self._looked, self._silent = 0, clock(), 0.0

    # -- in the process that is watched ----------------------------------------------------------------------
    def start(self) -> None:
        """Beat from now on, and end this process when the one that watches it is gone."""
        threading.Thread(target=self._go_on, name="heartbeat", daemon=True).start()

    def _go_on(self) -> None:
        while os.getppid() == self._watcher:
            self.beat()
            time.sleep(BEAT)
        os._exit(1)

    def beat(self) -> None:
        self._beats[0] += 1

    # -- in the process that watches -------------------------------------------------------------------------
    def is_silent(self) -> bool:
        """Look, several times a second: has it been silent for too long?

        A look counts a second at most. So the time in which the watching process was itself suspended, or starved on a
        machine with too much to do, is not held against the other one.
        """
        now, beats = self._clock(), self._beats[0]
        passed, self._looked = min(now - self._looked, LOOK), now
        self._silent = self._silent + passed if beats == self._seen else 0.0
        self._seen = beats
        return self._silent > self._patience


# -- where there is no fork --------------------------------------------------------------------------------------------
def leave_if_imported_again() -> None:
    """Called where runs begin: in a job that is still importing the main script, this is the script's unguarded call.

    The job leaves without a word; whoever started it sees the exit code and says `SENTENCE` once.
    """
    imports.refuse_while_importing()
    process = multiprocessing.current_process()
    # Python's own mark of a process that is being set up; the name tells ours from those of the user.
    if process.name.startswith(NAME) and getattr(process, "_inheriting", False):
        raise SystemExit(UNGUARDED)


@contextmanager
def _main_that_can_be_imported() -> Iterator[None]:
    """While inside, a main program that came from a pipe has no file, which no process could import."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or getattr(main, "__spec__", None) is not None or Path(file).exists():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file
