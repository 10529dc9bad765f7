"""Who wants to know how a run is going: a progress bar, a tracker, a test."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the command line's help does not wait for torch
    from fedkeel.config import Config
    from fedkeel.core.evaluation import Scores
    from fedkeel.core.messages import Broadcast, Update

log = logging.getLogger("fedkeel")


@dataclass(frozen=True)
class Aggregated:
    """A round whose updates have been averaged. It is the engine's own: to be looked at, never changed.

    Attributes:
        sent: what the clients began with.
        updates: those that counted, in the clients' order.
        model: what became of them; where the round was evaluated, as it was tested.
        memory: what each client keeps: `memory.look(client)`.
    """

    sent: Broadcast
    updates: Sequence[Update]
    model: Broadcast
    memory: Any


class Observer:
    """Is told what happens. Every method does nothing unless it is overridden, but notes go to the log.

    >>> class Rounds(Observer):
    ...     def round_done(self, round, rounds, scores, loss):
    ...         print(f"{round + 1} of {rounds}")
    >>> Rounds().round_done(0, 10, None, 0.5)  # the engine calls it: fedkeel.simulate(observer=Rounds())
    1 of 10
    """

    def started(self, config: Config, first_round: int) -> None:
        """A run begins, or goes on at `first_round`."""

    def client_done(self, round: int, done: int, total: int) -> None:
        """One more client of this round has sent its update, or has failed."""

    def aggregated(self, state: Aggregated) -> None:
        """A round is averaged and, where that is due, evaluated; it is not in a checkpoint yet."""

    def round_done(self, round: int, rounds: int, scores: Scores | None, loss: float) -> None:
        """A round is over and recorded. `scores` is None when it was not evaluated."""

    def note(self, text: str) -> None:
        """Something the user should know, in one sentence."""
        log.warning(text)


class Several:
    """Beside a class of those who are told: passes everything on to several, in their order. Notes go to the first."""

    def __init__(self, observers: Sequence[Any]) -> None:
        self.observers = list(observers)
        for event in dir(type(self)):
            if not event.startswith("_") and event != "note":
                setattr(self, event, partial(self._tell, event))

    def _tell(self, event: str, *what: Any) -> None:
        for observer in self.observers:
            getattr(observer, event)(*what)

    def note(self, text: str) -> None:
        self.observers[0].note(text)


class Observers(Several, Observer):
    """Several who want to know."""
