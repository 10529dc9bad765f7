"""Seconds by phase: of a round on the server, of local training, evaluation and answers on the clients.

A phase inside another is taken out of it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

PHASES = (
    *("reading data", "set-up", "sampling", "broadcast", "local training", "collection and checks"),
    *("aggregation", "extra exchanges", "evaluation", "recording", "checkpoint", "other"),
)
READING, SET_UP, SAMPLING, BROADCAST, TRAINING, COLLECTION = PHASES[:6]
AGGREGATION, QUESTIONS, EVALUATION, RECORDING, CHECKPOINT, OTHER = PHASES[6:]
# On a client: the global model loaded and the optimizer made; the method's `start`; batches drawn, gathered and
# augmented; forward, loss and backward; the optimizer's step; the method's `finish`, copies and checks of the update.
CLIENT_PHASES = (
    *("loading", "start", "batches", "forward and backward", "optimiser", "finish"),
    *("waiting for the GPU", "answering", "evaluating"),
)
LOADING, START, BATCHES, STEP, OPTIMIZER, FINISH, WAITING, ANSWERING, EVALUATING = CLIENT_PHASES


# Of each phase the `seconds`, how many of them the host only waited for the GPU (`waiting`), and the `calls`.
Times = dict[str, dict[str, float]]
NOTHING: dict[str, float] = {"seconds": 0.0, "waiting": 0.0, "calls": 0}


class Stopwatch:
    """Seconds by phase, each without the phases inside it. `synchronize` waits until the GPU has nothing left to do."""

    def __init__(self, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._times: Times = {}
        self._inside: list[float] = []  # of each open phase, the seconds of the phases inside it

    @contextmanager
    def __call__(self, phase: str, calls: int = 1) -> Iterator[None]:
        """Whatever happens inside belongs to `phase`; `calls` is 0 where it goes on with one that was counted."""
        self._inside.append(0.0)
        began = time.perf_counter()
        try:
            yield
        finally:
            done = ended = time.perf_counter()
            if self._synchronize is not None:
                self._synchronize()
                ended = time.perf_counter()
            whole = ended - began
            self.add({phase: {"seconds": whole - self._inside.pop(), "waiting": ended - done, "calls": calls}})
            if self._inside:
                self._inside[-1] += whole

    def over(self, phase: str, items: Iterable[T]) -> Iterator[T]:
        """The items; the time until each is there belongs to `phase`, what is done with it does not."""
        iterator, calls = iter(items), 1
        while True:
            with self(phase, calls):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            calls = 0
            yield item

    def add(self, times: Times) -> None:
        for name, spent in times.items():
            known = self._times.get(name, NOTHING)
            self._times[name] = {what: number + spent[what] for what, number in known.items()}

    def take(self) -> Times:
        """What was spent since the last time."""
        times, self._times = self._times, {}
        return times


def phase(name: str, calls: int = 1) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Every call of this method of an object with a `clock` belongs to the phase; where that is None, nothing runs."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            clock: Stopwatch | None = args[0].clock  # type: ignore[attr-defined]
            if clock is None:
                return method(*args, **kwargs)
            with clock(name, calls):
                return method(*args, **kwargs)

        return timed

    return decorate
