"""How long a round under `ray` takes, on paper: a model, its constants from measured rounds, and how far it is off.

    python benchmarks/rounds.py measure      # rounds of 1, 2 and 4 actors on two cores, into rounds.jsonl: ten minutes
    python benchmarks/rounds.py              # fit the model to some of 1 and 2 actors, check it against the others, and
                                             # keep its constants in rounds.json

A client takes an actor `client + parameter * P + image * n` seconds of a core (P parameters, n images; `image` differs
from model to model), and the driver `driver` seconds of one. Actors take clients as the executor's own `Schedule` gives
them out; where actors and driver want more cores than there are, they share them, and a client takes `crowd` longer
where all are busy. Then comes what a round costs once, `round + merge * A * P`, for the sums of A actors.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from fedkeel.engine.executors.ray.schedule import Schedule, Speeds

MEASURED = Path(__file__).resolve().parent / "rounds.jsonl"
FITTED = MEASURED.with_name("rounds.json")
CNN, MLP = "simple_cnn", "mlp(hidden=512)"
PARAMETERS = {CNN: 156_298, MLP: 1_843_210}
UNEQUAL = [400, *[40] * 20]
NOTHING = 0.1  # cores that others may use beside a turn
REFERENCE = {
    "clients": 10,
    "samples": 64,
    "batch": 8,
    "model": CNN,
    "nodes": 0,
}  # how fast the machine is at the moment


@dataclass(frozen=True)
class Round:
    """The work of a round, and how it is spread."""

    model: str
    sizes: tuple[int, ...]  # images of each client
    actors: int
    cores: int = 2
    sums: bool = True  # actors add up; else every update goes to the driver

    @property
    def parameters(self) -> int:
        return PARAMETERS[self.model]


@dataclass(frozen=True)
class Constants:
    """Seconds of a core."""

    client: float
    parameter: float
    image_cnn: float
    image_mlp: float
    round: float
    merge: float
    crowd: float  # a share
    driver: float = 0.0
    update: float = 0.0  # of the driver, for a parameter of an update that comes whole

    def image(self, model: str) -> float:
        return self.image_cnn if model == CNN else self.image_mlp

    def of_client(self, round: Round, images: int) -> float:
        return self.client + self.parameter * round.parameters + self.image(round.model) * images

    def of_driver(self, round: Round) -> float:
        return self.driver + (0.0 if round.sums else self.update * round.parameters)

    def once(self, round: Round) -> float:
        return self.round + self.merge * round.actors * round.parameters


# -- the model ---------------------------------------------------------------------------------------------------------
def makespan(work: Sequence[float], speeds: Sequence[float], width: int = 1, alone: float = math.inf) -> float:
    """Seconds until actors of these speeds have done all, given out by `Schedule`; work is in seconds of speed 1.

    One that does `width` clients side by side is done with what it is given when its share of all is done, and not
    before the longest, which alone has the speed `alone` (a share of the actor's).
    """
    schedule, known = Schedule(work), Speeds()
    for actor, speed in enumerate(speeds):
        known.measure(actor, speed, 1.0)
    until = dict.fromkeys(range(len(speeds)), 0.0)
    now, idle = 0.0, set(until)
    while len(schedule):
        free = {actor: max(0.0, end - now) for actor, end in until.items()}
        for actor in sorted(idle, key=lambda actor: -speeds[actor]):
            if not (places := schedule.next(actor, free, known, width)):
                continue
            amounts = [schedule.work(place) for place in places]
            seconds = max(sum(amounts), max(amounts) / alone if alone < math.inf else 0.0) / speeds[actor]
            until[actor] = now + seconds
            free[actor] = seconds
        now = min((end for end in until.values() if end > now), default=now)
        idle = {actor for actor, end in until.items() if end <= now}
    return max(until.values())


def seconds(round: Round, constants: Constants) -> float:
    """What the model says that the round takes."""
    wanted = round.actors + (1 if round.actors >= round.cores else 0)  # where a core is left, the driver has it
    crowd = 1 + (constants.crowd if wanted > round.cores else 0.0)
    work = [constants.of_client(round, images) * crowd for images in round.sizes]
    driver = constants.of_driver(round) * len(work)
    share = min(1.0, round.cores / round.actors)
    longest = makespan(work, [share] * round.actors)
    return max(longest, (sum(work) + driver) / round.cores, driver) + constants.once(round)


# -- its constants -----------------------------------------------------------------------------------------------------
def fitted(rounds: Sequence[tuple[Round, float, float]]) -> Constants:
    """From rounds with their seconds and those of the driver's CPU: the least squares of relative errors."""
    driver, update = driver_costs(rounds)
    free = [field.name for field in fields(Constants) if field.name not in ("driver", "update")]
    guess = np.log([1e-3, 1e-9, 3e-4, 3e-4, 2e-2, 1e-9, 0.1])
    summed = [(round, taken) for round, taken, _ in rounds if round.sums]

    def errors(logs: Any) -> list[float]:
        constants = Constants(**dict(zip(free, np.exp(logs), strict=True)), driver=driver, update=update)
        return [math.log(seconds(round, constants) / taken) for round, taken in summed]

    found = least_squares(errors, guess, bounds=(np.full(len(guess), -30.0), np.full(len(guess), 1.0)))
    return Constants(**dict(zip(free, (float(x) for x in np.exp(found.x)), strict=True)), driver=driver, update=update)


def driver_costs(rounds: Iterable[tuple[Round, float, float]]) -> tuple[float, float]:
    """CPU seconds of the driver for a client and, where its update comes whole, for each parameter of that."""
    rows, cpu = [], []
    for round, _, used in rounds:
        whole = 0 if round.sums else len(round.sizes) * round.parameters
        rows.append([1.0, len(round.sizes), whole, round.parameters])
        cpu.append(used)
    scale = np.array([1.0, 1.0, 1e-6, 1e-6])
    (_, client, update, _), *_ = np.linalg.lstsq(np.array(rows) * scale, np.array(cpu), rcond=None)
    return float(client), float(update) * 1e-6


# -- measuring ---------------------------------------------------------------------------------------------------------
def to_fit() -> list[Round]:
    grid = [(model, count, images) for model in (CNN, MLP) for count, images in ((20, 8), (20, 64), (100, 8))]
    summed = [Round(model, (images,) * count, actors) for model, count, images in grid for actors in (1, 2)]
    whole = [Round(model, (8,) * count, 2, sums=False) for model, count in ((CNN, 20), (CNN, 100), (MLP, 20))]
    return summed + whole


def to_check() -> list[Round]:
    works = [(CNN, (32,) * 40), (CNN, (200,) * 10), (MLP, (32,) * 30), (CNN, tuple(UNEQUAL))]
    return [Round(model, sizes, actors) for model, sizes in works for actors in (1, 2, 4)]


def measure(options: argparse.Namespace) -> None:
    """Those that are not in the file yet, in an order in which those to fit and those to check take turns."""
    from ray_cluster import loop

    lines = MEASURED.read_text().splitlines() if MEASURED.exists() else []
    known = [(line["use"], made_of(line)) for line in map(json.loads, lines)]
    asked = [("fit", round) for round in to_fit()] + [("check", round) for round in to_check()]
    random.Random(0).shuffle(asked)
    reference = loop("serial", REFERENCE)
    with MEASURED.open("a") as file:
        for use, round in asked:
            if (use, round) in known:
                continue
            taken = taken_by(round, reference, options)
            file.write(json.dumps({"use": use, **asdict(round), **taken}) + "\n")
            file.flush()
            print(use, described(round), round.actors, taken, flush=True)
    reference.close()


def taken_by(round: Round, reference: Any, options: argparse.Namespace) -> dict[str, float]:
    """Seconds of the clock and of the driver's CPU, medians over the turns in which others used the cores the least: it
    goes on, as long as patience lasts, until in enough of them that was next to nothing. With it what the reference,
    always the same work, took before and after each."""
    from ray_cluster import on_ray

    work = {"clients": len(round.sizes), "samples": list(round.sizes), "batch": 8, "model": round.model}
    side = on_ray(work, nodes=1, cores=round.actors, partial_means=round.sums)
    rounds = max(2, math.ceil(1 / side.seconds(2)))  # a turn of a second at least
    turns: list[tuple[float, dict[str, float]]] = []
    while len(turns) < options.patience and sum(others < NOTHING for others, _ in turns) < options.turns:
        before = reference.seconds(1)
        busy, own, began = busy_seconds(), own_seconds(), time.monotonic()
        answer = side.answer(rounds)
        used = busy_seconds() - busy - (own_seconds() - own)
        others = used / (time.monotonic() - began)
        turns.append((others, answer | {"reference": rounds * (before + reference.seconds(1)) / 2}))
    side.close()
    quietest = sorted(turns, key=lambda turn: turn[0])[: options.turns]
    keys = ("seconds", "cpu", "reference")
    taken = {key: statistics.median(answer[key] / rounds for _, answer in quietest) for key in keys}
    return taken | {"others": quietest[-1][0]}


def busy_seconds() -> float:
    """Of all cores, since the machine was started."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """CPU seconds of this process and of all that come from it."""
    parents, used = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            process = int(path.parent.name)
            parents[process], used[process] = int(fields[1]), int(fields[11]) + int(fields[12])
    own = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in own} - own:
        own |= more
    return sum(used.get(process, 0) for process in own) / os.sysconf("SC_CLK_TCK")


def made_of(line: dict[str, Any]) -> Round:
    return Round(**{name: line[name] for name in Round.__dataclass_fields__} | {"sizes": tuple(line["sizes"])})


def measured(use: str) -> list[tuple[Round, float, float]]:
    """Seconds of the clock and of the driver's CPU, on a machine that is always as fast as it was in the median."""
    lines = [json.loads(line) for line in MEASURED.read_text().splitlines()]
    lines.sort(key=lambda line: [*to_fit(), *to_check()].index(made_of(line)))
    usual = statistics.median(line["reference"] for line in lines)
    return [
        (made_of(line), line["seconds"] * usual / line["reference"], line["cpu"] * usual / line["reference"])
        for line in lines
        if line["use"] == use
    ]


# -- telling -----------------------------------------------------------------------------------------------------------
def described(round: Round) -> str:
    alike = len(set(round.sizes)) == 1
    sizes = f"{round.sizes[0]} images" if alike else f"{max(round.sizes)} images once and {min(round.sizes)} else"
    return f"`{round.model}`, {len(round.sizes)} clients of {sizes}"


def table(rounds: Sequence[tuple[Round, float, float]], constants: Constants) -> list[str]:
    lines = ["| work | actors | measured, s | predicted, s | error |", "|---|---:|---:|---:|---:|"]
    for round, taken, _ in rounds:
        said = seconds(round, constants)
        lines.append(f"| {described(round)} | {round.actors} | {taken:.2f} | {said:.2f} | {said / taken - 1:+.0%} |")
    return lines


def mean_error(rounds: Sequence[tuple[Round, float, float]], constants: Constants) -> float:
    return statistics.mean(abs(seconds(round, constants) / taken - 1) for round, taken, _ in rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", nargs="?", choices=["measure", "check"], default="check")
    parser.add_argument("--turns", type=int, default=3, help="undisturbed ones, whose median counts")
    parser.add_argument("--patience", type=int, default=15, help="turns in all, to find so many")
    options = parser.parse_args()
    if options.do == "measure":
        return measure(options)
    fit, check = [one for one in measured("fit") if one[0].sums], measured("check")
    constants = fitted(measured("fit"))
    FITTED.write_text(json.dumps(asdict(constants), indent=1) + "\n")
    for name, value in asdict(constants).items():
        print(f"{name:10} {value:.3g}")
    print("\nFitted to:\n", *table(fit, constants), sep="\n")
    print(f"\nMean error: {mean_error(fit, constants):.1%}\n\nChecked against:\n")
    print(*table(check, constants), sep="\n")
    print(f"\nMean error: {mean_error(check, constants):.1%}")
    return None


if __name__ == "__main__":
    main()
