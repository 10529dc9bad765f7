"""Who wants to know how a run is going: a progress bar, a tracker, a test."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedkeel.config import Config
    from fedkeel.engine.evaluation import Scores

log = logging.getLogger("fedkeel")


class Observer:
    """Is told what happens. Every method does nothing unless it is overridden, but notes go to the log."""

    def started(self, config: Config, first_round: int) -> None:
        """A run begins, or goes on at `first_round`."""

    def client_done(self, round: int, done: int, total: int) -> None:
        """One more client of this round has sent its update, or has failed."""

    def round_done(self, round: int, rounds: int, scores: Scores | None, loss: float) -> None:
        """A round is over and recorded. `scores` is None when it was not evaluated."""

    def note(self, text: str) -> None:
        """Something the user should know, in one sentence."""
        log.warning(text)
