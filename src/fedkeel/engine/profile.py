"""Where the time of a run goes: seconds per phase of each round, in `profile.json` of a run with `--profile`.

Two clocks run. One is the server's: its phases follow each other, so they add up to the wall clock. The other is the
clients': it tells the parts of local training, of evaluation and of answers apart where they happen. With the executor
`processes` that is in workers that run at the same time, so its seconds are worker-seconds, added up over all of them.

A phase inside another is taken out of it. On a GPU a phase ends when the GPU has done its work; how long the host had
nothing to do but wait for that stands beside it. Without `--profile` nothing is timed and nothing waits.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

FILE = "profile.json"
READING, SET_UP = "reading data", "set-up"
SAMPLING, BROADCAST, TRAINING, COLLECTION = "sampling", "broadcast", "local training", "collection and checks"
AGGREGATION, QUESTIONS, EVALUATION = "aggregation", "extra exchanges", "evaluation"
RECORDING, CHECKPOINT, OTHER = "recording", "checkpoint", "other"
PHASES = (
    READING,
    SET_UP,
    SAMPLING,
    BROADCAST,
    TRAINING,
    COLLECTION,
    AGGREGATION,
    QUESTIONS,
    EVALUATION,
    RECORDING,
    CHECKPOINT,
    OTHER,
)
# On a client: the global model loaded and the optimiser made; the method's `start`; batches drawn, gathered and
# augmented; forward, loss and backward; the optimiser's step; the method's `finish`, copies and checks of the update.
LOADING, START, BATCHES, STEP, OPTIMISER, FINISH = (
    "loading",
    "start",
    "batches",
    "forward and backward",
    "optimiser",
    "finish",
)
ANSWERING, EVALUATING, WAITING = "answering", "evaluating", "waiting for the GPU"
CLIENT_PHASES = (LOADING, START, BATCHES, STEP, OPTIMISER, FINISH, WAITING, ANSWERING, EVALUATING)
SECONDS_BETWEEN_SAVES = 5.0


@dataclass
class Spent:
    """On one phase. `waiting`: seconds of them in which the host only waited for the GPU."""

    seconds: float = 0.0
    waiting: float = 0.0
    calls: int = 0

    def __iadd__(self, other: Spent) -> Spent:
        self.seconds += other.seconds
        self.waiting += other.waiting
        self.calls += other.calls
        return self


Times = dict[str, Spent]


# -- clocks ----------------------------------------------------------------------------------------------------------
class Unwatched:
    """The clock of a run that is not profiled."""

    _nothing: AbstractContextManager[None] = nullcontext()

    def __call__(self, phase: str, calls: int = 1) -> AbstractContextManager[None]:
        """Whatever happens inside belongs to `phase`; `calls` is 0 where it goes on with one that was counted."""
        return self._nothing

    def over(self, phase: str, items: Iterable[T]) -> Iterable[T]:
        """The items; the time until each is there belongs to `phase`, what is done with it does not."""
        return items


class Stopwatch(Unwatched):
    """Seconds by phase, each without the phases inside it. `settle` waits until the GPU has nothing left to do."""

    def __init__(self, settle: Callable[[], None] | None = None) -> None:
        self._settle = settle
        self._times: Times = {}
        self._inside: list[float] = []  # of each open phase, the seconds of the phases inside it

    @contextmanager
    def __call__(self, phase: str, calls: int = 1) -> Iterator[None]:
        self._inside.append(0.0)
        began = time.perf_counter()
        try:
            yield
        finally:
            done = settled = time.perf_counter()
            if self._settle is not None:
                self._settle()
                settled = time.perf_counter()
            inside = self._inside.pop()
            self._add(phase, Spent(settled - began - inside, settled - done, calls))
            if self._inside:
                self._inside[-1] += settled - began

    def over(self, phase: str, items: Iterable[T]) -> Iterator[T]:
        iterator, calls = iter(items), 1
        while True:
            with self(phase, calls):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            calls = 0
            yield item

    def take(self) -> Times:
        """What was spent since the last time."""
        times, self._times = self._times, {}
        return times

    def _add(self, phase: str, spent: Spent) -> None:
        self._times.setdefault(phase, Spent())
        self._times[phase] += spent


class SharedStopwatch(Stopwatch):
    """One whose times this process and all that it forks add up together."""

    def __init__(self, phases: Sequence[str], settle: Callable[[], None] | None = None) -> None:
        super().__init__(settle)
        self._phases = phases
        self._shared = multiprocessing.get_context().Array("d", 3 * len(phases))

    def _add(self, phase: str, spent: Spent) -> None:
        super()._add(phase, spent)
        # Once for each client, not for each of its steps.
        if self._inside:
            return
        lock = self._shared.get_lock()
        # A worker that was killed in here would hold the lock for ever; then these seconds are lost, not the run.
        if not lock.acquire(timeout=1):
            return
        try:
            for name, added in super().take().items():
                place = 3 * self._phases.index(name)
                for offset, value in enumerate((added.seconds, added.waiting, added.calls)):
                    self._shared[place + offset] += value
        finally:
            lock.release()

    def take(self) -> Times:
        with self._shared.get_lock():
            values = list(self._shared[:])
            self._shared[:] = [0.0] * len(values)
        times = {
            name: Spent(values[3 * i], values[3 * i + 1], int(values[3 * i + 2])) for i, name in enumerate(self._phases)
        }
        return {name: spent for name, spent in times.items() if spent.calls}


def phase(name: str, calls: int = 1) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Every call of this method of an object with a `profile` belongs to the phase."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            profile: Unwatched = args[0].profile  # type: ignore[attr-defined]
            with profile(name, calls):
                return method(*args, **kwargs)

        return timed

    return decorate


# -- a run's profile -------------------------------------------------------------------------------------------------
class Unprofiled(Unwatched):
    """What a run has in place of a profile when nobody asked for one."""

    clients: Unwatched = Unwatched()

    def settled(self, executor: str, workers: int) -> None:
        """Which executor the run came to, where that is found out later."""

    def round(self, number: int) -> AbstractContextManager[None]:
        """What happens inside is this round."""
        return self._nothing

    def go_on(self, directory: Path, first_round: int) -> None:
        """Take over the rounds before `first_round` that an earlier start of this run has profiled."""

    def save(self, directory: Path, *, now: bool = True) -> None:
        """Write the file; without `now` only if that was not done a moment ago."""


class Profile(Unprofiled):
    """The times of a run, round by round.

    Attributes:
        clients: the clock that runs on the clients, in this process and in its workers.
    """

    def __init__(
        self,
        *,
        executor: str = "serial",
        device: str = "cpu",
        workers: int = 1,
        settle: Callable[[], None] | None = None,
    ) -> None:
        self._about = {"executor": executor, "device": device, "workers": workers}
        self._server = Stopwatch(settle)
        # Clients that share the GPU must not wait for each other.
        self.clients: SharedStopwatch = SharedStopwatch(CLIENT_PHASES, settle if executor == "serial" else None)
        self._starts = 1
        self._before: Times = {}
        self._rounds: list[dict[str, Any]] = []
        self._saved = 0.0

    def settled(self, executor: str, workers: int) -> None:
        self._about |= {"executor": executor, "workers": workers}

    def __call__(self, phase: str, calls: int = 1) -> AbstractContextManager[None]:
        return self._server(phase, calls)

    def over(self, phase: str, items: Iterable[T]) -> Iterable[T]:
        return self._server.over(phase, items)

    @contextmanager
    def round(self, number: int) -> Iterator[None]:
        self._set_up()
        began = time.perf_counter()
        try:
            yield
        except BaseException:  # a round that did not end is done again
            self._server.take(), self.clients.take()
            raise
        seconds = time.perf_counter() - began
        phases, clients = self._server.take(), self.clients.take()
        phases[OTHER] = Spent(max(0.0, seconds - sum(spent.seconds for spent in phases.values())), 0.0, 1)
        self._rounds.append(
            {"round": number, "seconds": _rounded(seconds), "phases": _plain(phases), "clients": _plain(clients)}
        )

    def _set_up(self) -> None:
        """What was spent before the first round."""
        self._before = _sum(self._before, self._server.take())

    def go_on(self, directory: Path, first_round: int) -> None:
        self._set_up()
        if first_round == 0 or not (directory / FILE).exists():
            return
        try:
            earlier = json.loads((directory / FILE).read_bytes())
            self._rounds = [entry for entry in earlier["rounds"] if entry["round"] < first_round]
            self._starts = earlier["starts"] + 1
            before = _times(earlier["set_up"])
        except (ValueError, KeyError, TypeError):
            return  # not of our making, or cut off by a full disk: the rounds from here on are still told
        self._before = _sum(before, self._before)

    def to_dict(self) -> dict[str, Any]:
        """What `profile.json` holds. All times are seconds."""
        phases = _sum(self._before, *(_times(entry["phases"]) for entry in self._rounds))
        clients = _sum(*(_times(entry["clients"]) for entry in self._rounds))
        seconds = sum(spent.seconds for spent in phases.values())
        total = {"seconds": _rounded(seconds), "phases": _plain(phases), "clients": _plain(clients)}
        return {
            **self._about,
            "starts": self._starts,
            "set_up": _plain(self._before),
            "total": total,
            "rounds": self._rounds,
        }

    def save(self, directory: Path, *, now: bool = True) -> None:
        if now or time.monotonic() - self._saved > SECONDS_BETWEEN_SAVES:
            from fedkeel.files import explained, write_atomically

            with explained(directory / FILE):
                write_atomically(directory / FILE, json.dumps(self.to_dict(), indent=1).encode() + b"\n")
            self._saved = time.monotonic()


def _sum(*parts: Times) -> Times:
    total: Times = {}
    for part in parts:
        for name, spent in part.items():
            total.setdefault(name, Spent())
            total[name] += spent
    return total


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


def _plain(times: Times) -> dict[str, dict[str, float]]:
    """For JSON, in the order of a round."""
    order = (*PHASES, *CLIENT_PHASES)
    return {
        name: {"seconds": _rounded(spent.seconds), "waiting": _rounded(spent.waiting), "calls": spent.calls}
        for name, spent in sorted(times.items(), key=lambda item: order.index(item[0]))
    }


def _times(plain: Mapping[str, Mapping[str, Any]]) -> Times:
    return {name: Spent(entry["seconds"], entry["waiting"], entry["calls"]) for name, entry in plain.items()}


# -- for reading -----------------------------------------------------------------------------------------------------
def phase_rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Phase, seconds, share of all in percent, milliseconds a round, calls, and of a GPU the seconds waited for it."""
    total, rounds = document["total"], max(1, len(document["rounds"]))
    return [
        (
            name,
            f"{spent['seconds']:.2f}",
            f"{100 * spent['seconds'] / (total['seconds'] or 1):.1f}",
            "-" if name in document["set_up"] else f"{1000 * spent['seconds'] / rounds:.1f}",
            str(spent["calls"]),
            *([f"{spent['waiting']:.2f}"] if document["device"] != "cpu" else []),
        )
        for name, spent in total["phases"].items()
    ]


def client_rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Part of a client's work, seconds, share of all such work in percent, calls, and the seconds waited for a GPU."""
    clients = document["total"]["clients"]
    whole = sum(spent["seconds"] for spent in clients.values()) or 1
    return [
        (
            name,
            f"{spent['seconds']:.2f}",
            f"{100 * spent['seconds'] / whole:.1f}",
            str(spent["calls"]),
            *([f"{spent['waiting']:.2f}"] if document["device"] != "cpu" else []),
        )
        for name, spent in clients.items()
    ]


def client_caption(document: dict[str, Any]) -> str:
    """What the clients' seconds are seconds of."""
    if document["executor"] == "processes":
        return f"Worker-seconds, added up over {document['workers']} worker processes that run at the same time."
    if document["executor"] == "cuda":
        return "Seconds of the host; the GPU works meanwhile, and launching captured steps is not among them."
    return "Seconds of this process, one client after another."
