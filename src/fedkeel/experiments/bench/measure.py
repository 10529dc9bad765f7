"""Both sides of each row in turn, A B A B, and the median of the ratios: whatever slows the machine for a while then
slows both."""

import datetime
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from fedkeel.config import from_one
from fedkeel.core.evaluation import Scores
from fedkeel.errors import FedkeelError
from fedkeel.experiments.bench import peers
from fedkeel.experiments.bench.rows import Benchmark, made_up
from fedkeel.experiments.bench.sides import Executed, UsualLoop, run_cell
from fedkeel.observer import Observer
from fedkeel.runs.origin import cpu_name
from fedkeel.stopping import Stopped

CYCLES = {"cpu": 5, "gpu": 3, "cost": 3}
SECONDS = 30.0  # after which a row begins no further cycle
SECONDS_OF_ONE = 4.0  # that the usual loop of one cycle should not take much longer than on a CPU
Say = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """One measured line, or the reason why it is missing."""

    row: str
    group: str
    work: str
    other: str = ""  # the names of the two sides
    ours: str = ""
    other_speed: float | None = None  # client-steps per second, the median of the cycles
    our_speed: float | None = None
    ratio: float | None = None  # of ours over the other's, for a cost the other way round; the median of the cycles
    ratios: tuple[float, ...] = ()  # of each cycle
    seconds: float | None = None  # of a whole experiment
    aim: float | None = None
    skipped: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the aim is reached; None without one."""
        if self.aim is None or self.skipped:
            return None
        if self.seconds is not None:
            return self.seconds < self.aim
        assert self.ratio is not None
        return self.ratio <= self.aim if self.group == "cost" else self.ratio >= self.aim


@dataclass
class Report:
    """What was measured, where and when."""

    machine: str
    torch: str
    date: str
    load: float = 0.0  # processes that were running or waiting for a core before it began
    quick: bool = False
    stopped: bool = False
    results: list[Result] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Others need the cores too: what runs on all of them is then slowed most."""
        return self.load > (os.cpu_count() or 1) / 2

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"results": [asdict(result) | {"met": result.met} for result in self.results]}


def bench(
    rows: Mapping[str, Benchmark],
    *,
    quick: bool = False,
    options: Mapping[str, Any] | None = None,
    say: Say = lambda _: None,
) -> Report:
    """Measure these rows. `options` are those of a run, for Fedkeel's side; `say` is told what is going on. A request
    to stop ends it with what there is."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    report = Report(machine(), torch.__version__, datetime.date.today().isoformat(), round(load, 1), quick)
    for name, row in rows.items():
        measure = time_cell if row.group == "cell" else ask_peer if row.peer else alternate
        reason = reason_to_skip(row)
        try:
            if not reason:
                measure(name, row, report, dict(options or {}), say)
        except Stopped:
            report.stopped = True
            break
        except torch.OutOfMemoryError:
            reason = "the memory of this GPU is too small for it"
        except FedkeelError as error:
            reason = str(error)
        if reason:
            report.results.append(Result(name, row.group, row.work, aim=row.aim, skipped=reason.rstrip(".")))
    return report


def reason_to_skip(row: Benchmark) -> str:
    """Why it cannot be measured here; empty where it can."""
    if row.peer:
        return peers.reason_to_skip(row)
    if row.group != "cpu" and not torch.cuda.is_available():
        return "torch sees no GPU on this machine"
    return ""


def alternate(name: str, row: Benchmark, report: Report, options: dict[str, Any], say: Say) -> None:
    """Time the sides in turn and add a result for each of Fedkeel's to the report, also when asked to stop."""
    say(f"{name}: warming up")
    row = row.quick() if report.quick else row
    row = fitted(row) if row.group == "cpu" else row
    aim = row.compiled_aim if options.get("compile") and row.compiled_aim else row.aim
    federation = made_up(row)
    sides: list[Executed | UsualLoop] = []
    cycles: list[list[float]] = []
    try:
        # Workers are forked before this process has trained anything and keeps threads for it.
        for executor in reversed([e for e in row.executors if e != "processes" or hasattr(os, "fork")]):
            sides.insert(0, Executed(row, federation, executor, **options))
        if row.against:
            sides.insert(0, Executed(row, federation, row.executors[0], **options, method=row.against))
        else:
            sides.insert(0, UsualLoop(row, federation))
        count, began = 1 if report.quick else CYCLES[row.group], time.monotonic()
        while len(cycles) < count and (not cycles or time.monotonic() - began < SECONDS):
            speeds = []
            for side in sides:
                say(f"{name}: {side.name}, {len(cycles) + 1} of {count}")
                speeds.append(side.speed())
            cycles.append(speeds)
    finally:
        for side in sides:
            side.close()
        other, *ours = zip(*cycles, strict=True) if cycles else [()]
        for side, speeds_of_side in zip(sides[1:], ours, strict=False):
            ratios = [mine / theirs for theirs, mine in zip(other, speeds_of_side, strict=True)]
            ratios = [1 / ratio for ratio in ratios] if row.against else ratios
            report.results.append(
                Result(
                    name,
                    row.group,
                    row.work,
                    other=row.against or sides[0].name,
                    ours=row.method if row.against else side.name,
                    other_speed=statistics.median(other),
                    our_speed=statistics.median(speeds_of_side),
                    ratio=statistics.median(ratios),
                    ratios=tuple(ratios),
                    # One core after another is what the usual loop does too: only several are to be faster.
                    aim=None if report.quick or side.name == "serial" else aim,
                )
            )


def ask_peer(name: str, row: Benchmark, report: Report, _: dict[str, Any], say: Say) -> None:
    """Against another library, by the script that knows how to run it."""
    say(f"{name}: both sides in turn, some minutes")
    for fields in peers.measure(row, quick=report.quick):
        fields |= {"aim": None} if report.quick else {}
        report.results.append(Result(name, row.group, **fields))


def fitted(row: Benchmark) -> Benchmark:
    """With fewer steps where this CPU is slow or busy: the row shall take a minute, whatever the machine."""
    probe = replace(row, clients=1, steps=3)
    seconds_per_step = 1 / UsualLoop(probe, made_up(probe)).speed()
    return replace(row, steps=min(row.steps, max(2, int(SECONDS_OF_ONE / (row.clients * seconds_per_step)))))


class _Rounds(Observer):
    def __init__(self, name: str, say: Say) -> None:
        self._name, self._say = name, say

    def round_done(self, round: int, rounds: int, scores: Scores | None, loss: float) -> None:
        self._say(f"{self._name}: round {from_one(round)} of {rounds}")


def time_cell(name: str, row: Benchmark, report: Report, options: dict[str, Any], say: Say) -> None:
    say(f"{name}: making the images")
    rounds, images = (2, 1000) if report.quick else (row.rounds, 50_000)
    done = run_cell(method=row.method, rounds=rounds, images=images, observer=_Rounds(name, say), **options)
    aim = None if report.quick else row.aim
    report.results.append(Result(name, row.group, row.work, ours=row.method, seconds=done["seconds"], aim=aim))


def machine() -> str:
    """Its processor, cores and GPU, in words."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return f"{cpu_name()}, {os.cpu_count()} cores, {gpu}"
