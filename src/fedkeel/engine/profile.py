"""Where the time of a run goes: seconds per phase of each round.

`timing.jsonl` has the main ones of every run, `profile.json` of a run with `--profile` has them all. Two clocks run:
one is the server's, whose phases follow each other, so they add up to the wall clock. The other, with `--profile`, is
the clients': it tells the parts of local training, of evaluation and of answers apart where they happen. Where that is
in workers that run at the same time, its seconds are worker-seconds, added up over all of them.

With `--profile` on a GPU a phase ends when the GPU has done its work; how
long the host had nothing to do but wait for that stands beside it. Without it nothing waits.
"""

import functools
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from fedkeel.engine.executors.executor import EXECUTORS, Executor, executor_class
from fedkeel.engine.stopwatch import CLIENT_PHASES, OTHER, PHASES, Stopwatch, Times
from fedkeel.files import explained, write_atomically

FILE = "profile.json"
SECONDS_BETWEEN_SAVES = 5.0


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
        self._saved = 0.0

    @contextmanager
    def round(self, number: int) -> Iterator[None]:
        """What happens inside is this round."""
        self._before = _sum(self._before, self.take())
        began = time.perf_counter()
        try:
            yield
        except BaseException:  # a round that did not end is done again
            self.take(), self.clients.take()
            raise
        seconds = time.perf_counter() - began
        phases, clients = self.take(), self.clients.take()
        rest = max(0.0, seconds - sum(spent["seconds"] for spent in phases.values()))
        phases[OTHER] = {"seconds": rest, "waiting": 0.0, "calls": 1}
        if self._detailed:
            self._rounds.append(
                {"round": number, "seconds": round(seconds, 6), "phases": _plain(phases), "clients": _plain(clients)}
            )

    def go_on(self, directory: Path, first_round: int) -> None:
        """Take over the rounds before `first_round` that an earlier start of this run has profiled."""
        self._before = _sum(self._before, self.take())
        if not self._detailed or first_round == 0 or not (directory / FILE).exists():
            return
        try:
            earlier = json.loads((directory / FILE).read_bytes())
            self._rounds = [entry for entry in earlier["rounds"] if entry["round"] < first_round]
            self._starts = earlier["starts"] + 1
            self._before = _sum(earlier["set_up"], self._before)
        except (ValueError, KeyError, TypeError, AttributeError):
            return  # not of our making, or cut off by a full disk: the rounds from here on are still told

    def to_dict(self) -> dict[str, Any]:
        """What `profile.json` holds. All times are seconds."""
        phases = _sum(self._before, *(entry["phases"] for entry in self._rounds))
        clients = _sum(*(entry["clients"] for entry in self._rounds))
        seconds = sum(spent["seconds"] for spent in phases.values())
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


def _plain(times: Times) -> Times:
    """Rounded, in the order of a round."""
    spent = [(name, times[name]) for name in (*PHASES, *CLIENT_PHASES) if name in times]
    return {name: {what: round(number, 6) for what, number in entry.items()} for name, entry in spent}


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
