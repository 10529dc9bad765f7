"""Two CPU cores: what the executor `ray` costs, against the executors of one machine.

    python benchmarks/ray_cluster.py [row ...] [--repeats 5]

Rows, each beside what it should reach:

- `speed`: two actors of one core each against `processes` with two workers; `simple_cnn`, batch 32, ten clients of 500
  images, the round loop of a run. The sides take turns (`cpu.py`).
- `overhead`: a round of a hundred clients with eight images each on two nodes of one core (`ray.cluster_utils`), less
  the training itself: half of what `serial` takes for the same clients on one core, in turn.
- `start`: seconds from `fedkeel run` to the beginning of its first round, for which Ray is started; in turn with
  `processes`. When a round began is told by `timing.jsonl`: when it was written, less what it says that the round took.
- `bytes`: what a round of a hundred clients on two nodes sends, in models: all that the machine sends to itself, every
  message of Ray among it. The driver shares memory with its own node; to and from the other one everything travels.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu import HERE, SIDES, Side, in_turn, write_images

TINY = {"clients": 100, "samples": 8, "batch": 8, "model": "simple_cnn", "nodes": 0}
WHOLE = {"clients": 10, "samples": 500, "batch": 32, "model": "simple_cnn", "nodes": 0}
NODES = 2


@dataclass(frozen=True)
class Figure:
    """A line of the table."""

    work: str
    measured: str
    aim: str
    reached: bool

    def line(self) -> str:
        verdict = "" if not self.aim else "yes" if self.reached else "no"
        return f"| {self.work} | {self.measured} | {self.aim} | {verdict} |"


def loop(executor: str, work: Mapping[str, Any], **options: Any) -> Side:
    """The round loop of Fedkeel under an executor; one thread for each client."""
    asked = json.dumps({"executor": executor, **work, **options})
    return Side([sys.executable, str(SIDES / "loop_side.py"), asked], OMP_NUM_THREADS="1")


def on_ray(work: Mapping[str, Any], **options: Any) -> Side:
    return loop("ray", work, ray_cores=1, **options)


def spread(values: Sequence[float], unit: str = "", digits: int = 2) -> str:
    shown = [f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values))]
    return f"{shown[0]}{unit} ({shown[1]} to {shown[2]})"


# -- speed -------------------------------------------------------------------------------------------------------------
def speed(options: argparse.Namespace) -> list[Figure]:
    others = {"processes": loop("processes", WHOLE, workers=2)}
    told = in_turn(on_ray(WHOLE), others, options)
    theirs, ours = told["processes"], told["fedkeel"]
    ratio = f"{theirs['ratio']:.2f} ({theirs['lowest']:.2f} to {theirs['highest']:.2f})"
    seconds = f"{ours['round_s']:.2f} s a round against {theirs['round_s']:.2f}"
    work = "two actors of one core against `processes` with two workers: speed"
    return [Figure(work, f"{ratio}: {seconds}", "0.9", theirs["ratio"] >= 0.9)]


# -- overhead ----------------------------------------------------------------------------------------------------------
def over(round: float, trained: float, cores: int = NODES) -> float:
    """Seconds of a round that are not training: `trained` is what one core alone takes for it."""
    return round - trained / cores


def overhead(options: argparse.Namespace) -> list[Figure]:
    figures = []
    for clients in options.clients:
        work = TINY | {"clients": clients}
        alone, spread_out = loop("serial", work), on_ray(work, nodes=NODES)
        trained, taken = [], []
        for _ in range(options.repeats):
            trained.append(alone.seconds(options.tiny_rounds, "train"))
            taken.append(over(spread_out.seconds(options.tiny_rounds), trained[-1]))
        alone.close()
        spread_out.close()
        aim = 50 + 2 * clients
        measured = f"{spread([1000 * seconds for seconds in taken], ' ms', 0)}; "
        measured += f"training alone: {1000 * statistics.median(trained) / NODES:.0f} ms"
        work_is = f"overhead of a round of {clients} tiny clients on {NODES} nodes"
        figures.append(Figure(work_is, measured, f"{aim} ms", 1000 * statistics.median(taken) < aim))
    return figures


# -- start -------------------------------------------------------------------------------------------------------------
def began(written: float, phases: Mapping[str, Any]) -> float:
    """When a round began, from when its line of `timing.jsonl` was written."""
    return written - sum(float(phases[phase]) for phase in ("train", "aggregate", "evaluate"))


def start(options: argparse.Namespace) -> list[Figure]:
    taken: dict[str, list[float]] = {"ray": [], "processes": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_images(folder / "images.npz")
        for number in range(options.repeats):
            for name, of_it in taken.items():
                of_it.append(seconds_to_first_round(name, folder, folder / f"{name}-{number}"))
    beside = f"`processes`: {statistics.median(taken['processes']):.1f} s"
    work = "from the command to the first round, Ray started by itself"
    measured = f"{spread(taken['ray'], ' s', 1)}; {beside}"
    return [Figure(work, measured, "10 s", statistics.median(taken["ray"]) < 10)]


def seconds_to_first_round(executor: str, folder: Path, out: Path) -> float:
    flags = {
        "data": f"npz(root='{folder / 'images.npz'}', validation=0)",
        "partition": "even(clients=10)",
        "executor": executor,
        "device": "cpu",
        "rounds": 1,
        "batch-size": 32,
        "out": out,
    }
    command = [sys.executable, "-m", "fedkeel", "run", *(t for k, v in flags.items() for t in (f"--{k}", str(v)))]
    called = time.time()
    environment = os.environ | {"PYTHONPATH": str(HERE.parent / "src")}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    timing = out / "timing.jsonl"
    return began(timing.stat().st_mtime, json.loads(timing.read_text())) - called


# -- bytes -------------------------------------------------------------------------------------------------------------
def moved(answer: Mapping[str, Any], rounds: int) -> float:
    """Models of a round that the machine has sent to itself."""
    return float(answer["loopback"]) / (answer["model"] * rounds)


def bytes_moved(options: argparse.Namespace) -> list[Figure]:
    side = on_ray(TINY, nodes=NODES)
    told = moved(side.answer(options.tiny_rounds), options.tiny_rounds)
    side.close()
    others = TINY["clients"] * (NODES - 1) // NODES
    work = f"models sent in a round of {TINY['clients']} clients on {NODES} nodes"
    return [Figure(work, f"{told:.1f}, of which {others} are the updates of clients on another node", "", True)]


ROWS: dict[str, Callable[[argparse.Namespace], list[Figure]]] = {
    "speed": speed,
    "overhead": overhead,
    "start": start,
    "bytes": bytes_moved,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=5, help="turns of each side")
    parser.add_argument("--rounds", type=int, default=2, help="rounds in a turn, of ten whole clients")
    parser.add_argument("--tiny-rounds", type=int, default=4, help="rounds in a turn, of tiny ones")
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100], help="of the row 'overhead'")
    options = parser.parse_args()
    print("| work | measured | aim | reached |\n|---|---|---|---|", flush=True)
    for row in options.rows:
        load = os.getloadavg()[0]
        for figure in ROWS[row](options):
            print(figure.line(), flush=True)
        print(f"{row}: load average {load:.1f} before", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
