"""What each method costs beside FedAvg: bytes that travel, exchanges of a round, and CPU time.

    python benchmarks/methods.py [method ...] [--turns 3] [--out results/costs.json]

Each method trains on the embedded digits, five clients of 100 images in batches of 20, `simple_cnn`, one thread; FedAvg
before each. Time is that of the CPU, which other work on the machine changes least, in the rounds between the first and
the last: the first warms up, and the last alone is evaluated. The figure is the median of the ratios of the turns.
Methods that are not named keep what the file has of them. `.ci/choose` writes the figures into docs/choose.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import fedkeel
from fedkeel.errors import unknown
from fedkeel.experiments.tables import RoundCost
from fedkeel.methods import METHODS
from fedkeel.runs.origin import cpu_name

ROUNDS = 6
SETTING: dict[str, Any] = {
    "rounds": ROUNDS,
    "evaluate_every": ROUNDS,
    "executor": "serial",
    "threads": 1,
    "subsample": 100,
    "batch_size": 20,
}
AS = {"fedfm": "fedfm(from_round=1)"}  # by default it begins later than these rounds end
OUT = Path(__file__).parents[1] / "results" / "costs.json"


class Stopwatch(fedkeel.Observer):
    """The CPU time at the end of each round."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def round_done(self, *_: object) -> None:
        self.times.append(time.process_time())


def once(method: str) -> tuple[float, RoundCost]:
    """CPU seconds of the rounds between the first and the last, and what travelled in a round."""
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        run = fedkeel.simulate(method=method, observer=watch, directory=f"{folder}/run", verbose=False, **SETTING)
        summary = run.summary
    cost = RoundCost.of([summary or {}])
    if cost is None:
        sys.exit(f"'{method}' has not counted what travelled.")
    return watch.times[-2] - watch.times[0], cost


def measure(method: str, turns: int) -> dict[str, float]:
    pairs = [(once("fedavg"), once(AS.get(method, method))) for _ in range(turns)]
    ratios = [seconds / usual for (usual, _), (seconds, _) in pairs]
    (_, base), (_, cost) = pairs[0]
    return {
        "time": round(statistics.median(ratios), 2),
        "lowest": round(min(ratios), 2),
        "highest": round(max(ratios), 2),
        "traffic": round((cost.bytes_up + cost.bytes_down) / (base.bytes_up + base.bytes_down), 3),
        "exchanges": round(1 + cost.extra_exchanges, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", default=METHODS.names(), metavar="method", help="default: all")
    parser.add_argument("--turns", type=int, default=3, help="turns of each side (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=OUT, help="default: results/costs.json")
    options = parser.parse_args()
    for name in options.methods:
        if name not in METHODS:
            sys.exit(unknown("method", name, METHODS.names()))
    if options.turns < 1:
        sys.exit(f"--turns is 1 or more, not {options.turns}.")
    kept = json.loads(options.out.read_text())["methods"] if options.out.exists() else {}
    for method in options.methods:
        kept[method] = measure(method, options.turns)
        print(method, kept[method], flush=True)
        machine = f"{cpu_name()}, torch {torch.__version__.partition('+')[0]}, {datetime.now(timezone.utc).date()}"
        document = {"machine": machine, "turns": options.turns, "methods": dict(sorted(kept.items()))}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
