"""Where the time of a run goes: seconds per phase of each round.

`timing.jsonl` has the main ones of every run, `profile.json` of a run with `--profile` has them all. Two clocks run:
one is the server's, whose phases follow each other, so they add up to the wall clock. The other, with `--profile`, is
the clients': it tells the parts of local training, of evaluation and of answers apart where they happen. Where that is
in workers that run at the same time, its seconds are worker-seconds, added up over all of them.

A phase inside another is taken out of it. With `--profile` on a GPU a phase ends when the GPU has done its work; how
long the host had nothing to do but wait for that stands beside it. Without it nothing waits.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from fedkeel.core.client import LocalClient
from fedkeel.core.messages import Broadcast
from fedkeel.core.state import Tensors
from fedkeel.engine.executors.executor import EXECUTORS, Executor, executor_class
from fedkeel.engine.local import Worker
from fedkeel.files import explained, write_atomically

T = TypeVar("T")
P = ParamSpec("P")

FILE = "profile.json"
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
SECONDS_BETWEEN_SAVES = 5.0


@dataclass
class Spent:
    """On one phase. `waiting`: seconds of them in which the host only waited for the GPU. `whole`: the seconds together
    with those of the phases inside."""

    seconds: float = 0.0
    waiting: float = 0.0
    calls: int = 0
    whole: float = 0.0

    def __iadd__(self, other: Spent) -> Spent:
        self.seconds += other.seconds
        self.waiting += other.waiting
        self.calls += other.calls
        self.whole += other.whole
        return self


Times = dict[str, Spent]


# -- the clock -------------------------------------------------------------------------------------------------------
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
            self.add({phase: Spent(whole - self._inside.pop(), ended - done, calls, whole)})
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
            self._times.setdefault(name, Spent())
            self._times[name] += spent

    def whole(self, *phases: str) -> float:
        """Seconds of these phases since the last `take`, with what was inside them."""
        return sum(self._times[name].whole for name in phases if name in self._times)

    def take(self) -> Times:
        """What was spent since the last time."""
        times, self._times = self._times, {}
        return times


def phase(name: str, calls: int = 1) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Every call of this method of an object with a `clock` belongs to the phase."""

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            with args[0].clock(name, calls):  # type: ignore[attr-defined]
                return method(*args, **kwargs)

        return timed

    return decorate


@dataclass
class ProfiledWorker(Worker):
    """Does exactly what a worker does, under a clock. What is in no part of training is counted as making batches:
    between two steps nothing else happens."""

    train = phase(BATCHES, calls=0)(Worker.train)
    plan = phase(BATCHES)(Worker.plan)
    optimizer = phase(LOADING, calls=0)(Worker.optimizer)
    step = phase(STEP)(Worker.step)
    end = phase(FINISH, calls=0)(Worker.end)
    leave = phase(FINISH)(Worker.leave)
    answer = phase(ANSWERING)(Worker.answer)
    evaluate = phase(EVALUATING)(Worker.evaluate)
    _arrive = phase(LOADING)(Worker._arrive)
    _begin = phase(START)(Worker.begin)

    def begin(
        self, name: str, broadcast: Broadcast, memory: Tensors, optimizer: torch.optim.Optimizer | None = None
    ) -> LocalClient:
        client = self._begin(name, broadcast, memory, optimizer)
        used = client.optimizer
        if used is not None and "step" not in vars(used):  # a resident one serves many clients
            used.step = self._timed(used.step)  # type: ignore[method-assign]
        return client

    def _timed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            assert self.clock is not None
            with self.clock(OPTIMIZER):
                return step(*args, **kwargs)

        return timed

    def waiting(self) -> AbstractContextManager[None]:
        assert self.clock is not None
        return self.clock(WAITING)


# -- a run's profile -------------------------------------------------------------------------------------------------
class Profile(Stopwatch):
    """The server's clock, and with `detailed` (`--profile`) the times of a run, round by round.

    Attributes:
        clients: the clock that runs on the clients.
    """

    def __init__(
        self, executor: str = "", device: torch.device | None = None, workers: int = 1, *, detailed: bool = False
    ) -> None:
        on_gpu = detailed and device is not None and device.type == "cuda"
        synchronize = functools.partial(torch.cuda.synchronize, device) if on_gpu else None
        super().__init__(synchronize)
        self._detailed = detailed
        self.about = {"executor": executor, "device": str(device), "workers": workers}
        # Clients that share the GPU must not wait for each other.
        alone = synchronize is not None and not executor_class(executor).captures_steps
        self.clients = Stopwatch(synchronize if alone else None)
        self._starts = 1
        self._before: Times = {}
        self._rounds: list[dict[str, Any]] = []
        self._saved, self._began = 0.0, time.perf_counter()

    @contextmanager
    def round(self, number: int) -> Iterator[None]:
        """What happens inside is this round."""
        self._before = _sum(self._before, self.take())
        self._began = time.perf_counter()
        try:
            yield
        except BaseException:  # a round that did not end is done again
            self.take(), self.clients.take()
            raise
        seconds = time.perf_counter() - self._began
        phases, clients = self.take(), self.clients.take()
        phases[OTHER] = Spent(max(0.0, seconds - sum(spent.seconds for spent in phases.values())), 0.0, 1)
        if self._detailed:
            self._rounds.append(
                {"round": number, "seconds": round(seconds, 6), "phases": _plain(phases), "clients": _plain(clients)}
            )

    def stages(self) -> dict[str, float]:
        """The seconds of this round so far, for `timing.jsonl`: until all updates are there, aggregation, the rest."""
        train, aggregate = self.whole(SAMPLING, BROADCAST, COLLECTION), self.whole(AGGREGATION)
        rest = time.perf_counter() - self._began - train - aggregate
        return {"train": train, "aggregate": aggregate, "evaluate": rest}

    def go_on(self, directory: Path, first_round: int) -> None:
        """Take over the rounds before `first_round` that an earlier start of this run has profiled."""
        self._before = _sum(self._before, self.take())
        if not self._detailed or first_round == 0 or not (directory / FILE).exists():
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
        total = {"seconds": round(seconds, 6), "phases": _plain(phases), "clients": _plain(clients)}
        set_up = _plain(self._before)
        return {**self.about, "starts": self._starts, "set_up": set_up, "total": total, "rounds": self._rounds}

    def save(self, directory: Path, *, now: bool = True) -> None:
        """Write the file; without `now` only if that was not done a moment ago."""
        if self._detailed and (now or time.monotonic() - self._saved > SECONDS_BETWEEN_SAVES):
            with explained(directory / FILE):
                write_atomically(directory / FILE, json.dumps(self.to_dict(), indent=1).encode() + b"\n")
            self._saved = time.monotonic()


def _sum(*parts: Times) -> Times:
    total = Stopwatch()
    for part in parts:
        total.add(part)
    return total.take()


def _plain(times: Times) -> dict[str, dict[str, float]]:
    """For JSON, in the order of a round."""
    spent = [(name, times[name]) for name in (*PHASES, *CLIENT_PHASES) if name in times]
    return {
        name: {"seconds": round(s.seconds, 6), "waiting": round(s.waiting, 6), "calls": s.calls} for name, s in spent
    }


def _times(plain: Mapping[str, Mapping[str, Any]]) -> Times:
    return {name: Spent(entry["seconds"], entry["waiting"], entry["calls"]) for name, entry in plain.items()}


# -- for reading -----------------------------------------------------------------------------------------------------
def phase_rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Phase, seconds, share of all in percent, milliseconds a round, calls, and of a GPU the seconds waited for it."""
    rounds, total = max(1, len(document["rounds"])), document["total"]
    rows = _rows(document, total["phases"], total["seconds"])
    each = [
        "-" if name in document["set_up"] else f"{1000 * spent['seconds'] / rounds:.1f}"
        for name, spent in total["phases"].items()
    ]
    return [(*row[:3], milliseconds, *row[3:]) for row, milliseconds in zip(rows, each, strict=True)]


def client_rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
    """Part of a client's work, seconds, share of all such work in percent, calls, and the seconds waited for a GPU."""
    clients = document["total"]["clients"]
    return _rows(document, clients, sum(spent["seconds"] for spent in clients.values()))


def _rows(document: dict[str, Any], phases: Mapping[str, Any], whole: float) -> list[tuple[str, ...]]:
    on_gpu = document["device"] != "cpu"
    return [
        (
            name,
            f"{spent['seconds']:.2f}",
            f"{100 * spent['seconds'] / (whole or 1):.1f}",
            str(spent["calls"]),
            *([f"{spent['waiting']:.2f}"] if on_gpu else []),
        )
        for name, spent in phases.items()
    ]


def client_caption(document: dict[str, Any]) -> str:
    """What the clients' seconds are seconds of."""
    name = document["executor"]
    known = executor_class(name) if name in EXECUTORS else Executor
    return known.seconds_of.format(workers=document["workers"])
