"""Two CPU cores: what the executor `ray` costs, against the executors of one machine.

    python benchmarks/ray_cluster.py [row ...] [--repeats 5]

Rows, each beside what it should reach:

- `speed`: two actors of one core each against `processes` with two workers; `simple_cnn`, batch 32, ten clients of 500
  images, the round loop of a run. The sides take turns (`cpu.py`).
- `overhead`: a round of a hundred clients with eight images each on two nodes of one core (`ray.cluster_utils`), less
  the training itself: half of what `serial` takes for the same clients on one core, in turn.
- `start`: seconds from `fedkeel run` to the beginning of its first round, for which Ray is started; in turn with
  `processes`. When a round began is told by `timing.jsonl`: when it was written, less what it says that the round took.
- `bytes`: what goes through the driver in a round of a hundred clients on two nodes, in models: as the executor counts
  it, and as Ray counts what comes into the nodes' object stores. The loopback counts every message of Ray, too.
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
        for partial in (True, False):
            work = TINY | {"clients": clients}
            alone, spread_out = loop("serial", work), on_ray(work, nodes=NODES, partial_means=partial)
            trained, taken = [], []
            for _ in range(options.repeats):
                trained.append(alone.seconds(options.tiny_rounds, "train"))
                taken.append(over(spread_out.seconds(options.tiny_rounds), trained[-1]))
            alone.close()
            spread_out.close()
            aim, how = 50 + 2 * clients, "sums" if partial else "updates"
            figures.append(
                Figure(
                    f"overhead of a round of {clients} tiny clients on {NODES} nodes, which send {how}",
                    f"{spread([1000 * seconds for seconds in taken], ' ms', 0)}; "
                    f"training alone: {1000 * statistics.median(trained) / NODES:.0f} ms",
                    f"{aim} ms" if partial else "",
                    1000 * statistics.median(taken) < aim,
                )
            )
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
def moved(answer: Mapping[str, Any], rounds: int) -> dict[str, float]:
    """Bytes of a round by where they went, in models, from what a side counted."""
    nodes = [numbers for name, numbers in answer["counted"].items() if name not in ("loopback", "stores")]
    one = answer["model"] * rounds
    total = {way: sum(numbers.get(f"bytes_{way}", 0) for numbers in nodes) / one for way in ("up", "down", "between")}
    stores = sum(answer["counted"]["stores"].values()) / one
    return total | {"stores": stores, "loopback": answer["counted"]["loopback"]["bytes"] / one}


def expected_in_stores(partial: bool, clients: int, nodes: int = NODES) -> float:
    """Models that come into the object stores in a round, by the sizes of the objects alone.

    Each node has the broadcast. A sum is of whole numbers of 64 bits, twice a model: one on each node, a copy of all
    but one where they are added up, and the mean. Updates lie where they were made; those of other nodes are copied.
    """
    if partial:
        return nodes + 2 * nodes + 2 * (nodes - 1) + 1
    return nodes + clients + clients * (nodes - 1) / nodes


def bytes_moved(options: argparse.Namespace) -> list[Figure]:
    figures = []
    for partial in (True, False):
        side = on_ray(TINY, nodes=NODES, partial_means=partial)
        told = moved(side.answer(options.tiny_rounds), options.tiny_rounds)
        side.close()
        ways = f"{told['up']:.2f} up, {told['down']:.2f} down, {told['between']:.2f} from node to node"
        objects = expected_in_stores(partial, TINY["clients"])
        ray = f"into Ray's stores {told['stores']:.1f} ({objects:.0f} by the objects)"
        reached = told["up"] <= NODES and told["down"] <= NODES
        work = f"models through the driver in a round, 100 clients on {NODES} nodes, " + (
            "sums" if partial else "updates"
        )
        aim = "2 up, 2 down" if partial else ""
        figures.append(Figure(work, f"{ways}; {ray}; loopback {told['loopback']:.1f}", aim, reached))
    return figures


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
