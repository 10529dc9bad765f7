"""Signs of life: how a process tells another that works for long from one that hangs.

A thread of the process that is watched counts in memory that both share, whatever else the process does: how long a
client trains is nobody's guess. Stopped, or stuck in the system, it no longer counts.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable

BEAT = 0.5  # seconds between two beats
PATIENCE = 60.0  # seconds without one, as the watching process has felt them
LOOK = 1.0  # seconds that one look counts at most


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
