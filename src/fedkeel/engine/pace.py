"""When a run writes a checkpoint: after every round, unless writing would take too much of the time."""

from __future__ import annotations

import time
from collections.abc import Callable

SHARE = 0.05  # of the time that may go into checkpoints
QUICK = 0.25  # seconds: what takes less is written every round


class Pace:
    """`every` rounds; with 0, every round as long as that is quick, else as often as SHARE of the time allows.

    Where a checkpoint is written changes no result: it only decides how many rounds are done again after a crash.
    """

    def __init__(self, every: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.every, self._clock = every, clock
        self._took, self._written = 0.0, -float("inf")

    def is_due(self, round: int) -> bool:
        if self.every:
            return (round + 1) % self.every == 0
        return self._took < QUICK or self._clock() - self._written >= self._took / SHARE

    def write(self, checkpoint: Callable[[], None]) -> None:
        began = self._clock()
        checkpoint()
        self._written = self._clock()
        self._took = self._written - began
