"""How many local steps a graph has. The results are the same whatever it is, so the first rounds of a run try it out.

Long graphs leave the host and the GPU's front end less to do for each step; of large networks the GPU runs fewer of
them side by side. Neither can be told beforehand, nor on one slot alone.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedkeel.engine.executors.cuda.slot import Slot

log = logging.getLogger("fedkeel")
LENGTHS = (16, 8, 4, 2, 1)
FIRST = 2
FEWEST_ROUNDS, MOST_ROUNDS = 4, 24  # that a length is measured in: clients of unequal sizes make rounds unlike
SURE = 0.01  # of the time of a step: its standard error, at which it is known well enough
GAIN = 0.03  # of the time, below which a longer graph is not worth its capture
SHARE = 0.05  # of the time that is left, which captures for a trial may take


class GraphLength:
    """The length in use: 2, then twice as many steps as long as that is faster; where it is not at once, one step."""

    def __init__(self) -> None:
        self.steps = self._best = FIRST
        self._left = [4, 8, 16]  # to be tried
        self._fastest = math.inf  # seconds of a step with the best
        self._capture = 0.0  # seconds that the capture of a step took
        self._seconds: list[float] = []  # of a step, in the rounds of the present length
        self.is_settled = False

    def see(self, slots: Sequence[Slot], clients: int, seconds: float, rounds_left: int) -> None:
        """A round of these slots took so long. One with captures says nothing but how long those take."""
        if self.is_settled:
            return
        if captured := sum(slot.captured[1] for slot in slots):
            self._capture = sum(slot.captured[0] for slot in slots) / captured
            return
        steps = max(sum(slot.queued for slot in slots), 1)
        self._seconds.append(seconds / steps)
        if not self._is_known():
            return
        mean = fmean(self._seconds)
        if mean < (1 - GAIN) * self._fastest:
            self._fastest, self._best = mean, self.steps
        else:
            self._left = [1] if self._best == FIRST and self.steps > FIRST else []
        wanted = self._left.pop(0) if self._left else 0
        cost, time_left = self._capture * wanted * len(slots), rounds_left * mean * steps
        if wanted and 2 * wanted <= steps / clients and cost <= SHARE * time_left:
            self.steps, self._seconds = wanted, []
        else:
            self.settle()

    def _is_known(self) -> bool:
        rounds = len(self._seconds)
        if not FEWEST_ROUNDS <= rounds < MOST_ROUNDS:
            return rounds >= MOST_ROUNDS
        return stdev(self._seconds) <= SURE * fmean(self._seconds) * math.sqrt(rounds)

    def settle(self) -> bool:
        """End the trial with the best so far; whether there was one under way."""
        was_trying = not self.is_settled and self.steps != self._best
        self.steps, self.is_settled = self._best, True
        if math.isfinite(self._fastest):
            log.info("Graphs of %d local steps: %.3f ms a step.", self._best, 1000 * self._fastest)
        return was_trying
