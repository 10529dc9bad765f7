"""Two CPU cores: Fedkeel against the usual loop, Apple's `pfl` and Flower's simulation, and its executors in turn.

    python benchmarks/cpu.py --make-environments          # once: virtual environments for pfl and Flower
    python benchmarks/cpu.py [row ...] [--batches 4 32] [--repeats 5] [--rounds 2]

Rows: `step` (CPU time of the usual loop and of `serial` on one thread: what a step costs, whatever else the machine
does), `serial` (the executor `processes` against `serial` on one thread and on all), `usual`, `pfl`, `flower`. All
sides do the same work (`sides/work.py`): `simple_cnn`, ten clients of 500 images a round, one epoch of SGD with
momentum, no augmentation, no evaluation; against pfl without batch norm, which it cannot average.

Both sides of a row are warm and take turns, A B A B: the figure is the median of the ratios of neighbouring turns,
so that what else the machine does disturbs both alike. Flower runs whole commands, in turn with `fedkeel run`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SIDES = HERE / "sides"
PACKAGES = {"pfl": "pfl[pytorch]==0.6.0", "flwr": "flwr[simulation]==1.41.0"}
TORCH = "torch==2.13.0"


class Side:
    """A process that runs rounds when it is told to."""

    def __init__(self, command: Sequence[str], **environment: str) -> None:
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": f"{SIDES}{os.pathsep}{HERE.parent / 'src'}"} | environment,
        )
        self.seconds(1)  # warm

    def seconds(self, rounds: int, clock: str = "seconds") -> float:
        """Seconds of a round, of the clock or of the CPU."""
        return float(self.answer(rounds)[clock]) / rounds

    def answer(self, rounds: int) -> dict[str, Any]:
        """All that the side says of so many rounds."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{rounds}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith('{"seconds"'):
                return dict(json.loads(line))
        raise SystemExit(f"A side ended early: {self.process.args}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.wait()


def in_turn(
    ours: Side, others: dict[str, Side], options: argparse.Namespace, clock: str = "seconds"
) -> dict[str, dict[str, float]]:
    """For each other side the seconds of a round, and how many times ours is faster: medians over the turns."""
    times: dict[str, list[float]] = {name: [] for name in ["fedkeel", *others]}
    for _ in range(options.repeats):
        times["fedkeel"].append(ours.seconds(options.rounds, clock))
        for name, side in others.items():
            times[name].append(side.seconds(options.rounds, clock))
    for side in [ours, *others.values()]:
        side.close()
    result = {"fedkeel": {"round_s": statistics.median(times["fedkeel"])}}
    for name in others:
        ratios = [theirs / mine for theirs, mine in zip(times[name], times["fedkeel"], strict=True)]
        result[name] = {
            "round_s": statistics.median(times[name]),
            "ratio": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
        }
    return result


def fedkeel(batch: int, executor: str = "auto", norm: str = "norm", **environment: str) -> Side:
    return Side([sys.executable, str(SIDES / "fedkeel_side.py"), str(batch), executor, norm], **environment)


def usual_loop(batch: int, threads: int) -> Side:
    return Side([sys.executable, str(SIDES / "usual_side.py"), str(batch), str(threads), "norm"])


def step(batch: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    others = {"usual loop, 1 thread": usual_loop(batch, 1)}
    return in_turn(fedkeel(batch, "serial", OMP_NUM_THREADS="1"), others, options, "cpu")


def usual(batch: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    others = {f"usual loop, {options.cores} threads": usual_loop(batch, options.cores)}
    return in_turn(fedkeel(batch), others, options)


def serial(batch: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    others = {
        "serial, 1 thread": fedkeel(batch, "serial", OMP_NUM_THREADS="1"),
        f"serial, {options.cores} threads": fedkeel(batch, "serial", OMP_NUM_THREADS=str(options.cores)),
    }
    return in_turn(fedkeel(batch, "processes"), others, options)


def pfl(batch: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    binaries, script = options.environments / "pfl" / "bin", str(SIDES / "pfl_side.py")
    several = ["torchrun", "--standalone", "--nproc-per-node", str(options.cores)]
    others = {
        f"pfl, {options.cores} threads": Side([str(binaries / "python"), script, str(batch), str(options.cores)]),
        f"pfl, torchrun with {options.cores} processes": Side(
            [str(binaries / several[0]), *several[1:], script, str(batch), "1"], OMP_NUM_THREADS="1"
        ),
    }
    return in_turn(fedkeel(batch, norm="no norm"), others, options)


# -- Flower: whole commands --------------------------------------------------------------------------------------
def flower(batch: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Against Flower with one core for each client, as many at once as there are cores; and with its default of two."""
    runs: dict[str, list[dict[str, float]]] = {"fedkeel": []}
    runs |= {f"flower, {cores} cores a client": [] for cores in (1, 2)}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_images(folder / "images.npz")
        for number in range(options.commands):
            runs["fedkeel"].append(fedkeel_command(batch, folder, number))
            for cores in (1, 2):
                home = folder / f"home-{number}-{cores}"
                runs[f"flower, {cores} cores a client"].append(flower_command(batch, home, cores, options))
    result = {}
    for name, taken in runs.items():
        result[name] = {key: statistics.median(run[key] for run in taken) for key in ("command_s", "round_s")}
        if name != "fedkeel":
            pairs = list(zip(taken, runs["fedkeel"], strict=True))
            for key in ("command_s", "round_s"):
                result[name][f"ratio_of_{key}"] = statistics.median(theirs[key] / ours[key] for theirs, ours in pairs)
    return result


def write_images(path: Path) -> None:
    sys.path.insert(0, str(SIDES))
    import numpy as np
    import work

    images, labels = work.images_and_labels()
    pixels = images.permute(0, 2, 3, 1).numpy()
    np.savez(path, x_made=pixels, y_made=labels.numpy(), x_made_test=pixels[:100], y_made_test=labels[:100].numpy())


def fedkeel_command(batch: int, folder: Path, number: int) -> dict[str, float]:
    out = folder / f"fedkeel-{number}"
    transforms = "train_transform='normalise(like=cifar10)', test_transform='normalise(like=cifar10)', validation=0"
    flags = {
        "data": f"npz(root='{folder / 'images.npz'}', {transforms})",
        "partition": "even(clients=10)",
        "rounds": 20,
        "batch-size": batch,
        "learning-rate": 0.001,
        "evaluate-every": 20,
        "out": out,
    }
    command = [sys.executable, "-m", "fedkeel", "run", *(t for k, v in flags.items() for t in (f"--{k}", str(v)))]
    began = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(HERE.parent / "src")}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    seconds = time.perf_counter() - began
    timing = [json.loads(line) for line in (out / "timing.jsonl").read_text().splitlines()]
    return {"command_s": seconds, "round_s": statistics.median(t["train"] + t["aggregate"] for t in timing[2:])}


def flower_command(batch: int, home: Path, cores: int, options: argparse.Namespace) -> dict[str, float]:
    binaries, times = options.environments / "flwr" / "bin", home / "times"
    environment = os.environ | {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(SIDES),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": "39591",
        "FLWR_LOCAL_CONTROL_API_PORT": "39593",
        "FLOWER_SIDE_TIMES": str(times),
    }
    home.mkdir()
    command = [
        *("flwr", "run", str(SIDES / "flower"), "local", "--stream"),
        *("--run-config", f"rounds=20 batch-size={batch}"),
        *("--federation-config", f"num-supernodes=10 client-resources-num-cpus={cores}"),
    ]
    began = time.perf_counter()
    try:
        done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=1800)
    finally:
        stop_processes_of(home)
    seconds = time.perf_counter() - began
    clock = [float(line) for line in times.read_text().split()] if times.exists() else []
    if done.returncode or len(clock) < 21:
        raise SystemExit(f"Flower did not finish:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    rounds = [later - earlier for earlier, later in itertools.pairwise(clock)]
    return {"command_s": seconds, "round_s": statistics.median(rounds[2:])}


def stop_processes_of(home: Path) -> None:
    """`flwr run` leaves a SuperLink behind; it and what it started have this FLWR_HOME in their environment."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = f"FLWR_HOME={home}\0".encode() in (process / "environ").read_bytes()
        except OSError:
            continue
        if ours:
            os.kill(int(process.name), signal.SIGTERM)


def make_environments(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "constraints.txt").write_text(f"{TORCH}\n")  # a newer one may bring gigabytes of CUDA
    for name, package in PACKAGES.items():
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        install = [str(folder / name / "bin" / "pip"), "install", "-q", "-c", str(folder / "constraints.txt")]
        subprocess.run([*install, package, TORCH], check=True)


ROWS = {"step": step, "serial": serial, "usual": usual, "pfl": pfl, "flower": flower}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(ROWS))
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 32])
    parser.add_argument("--repeats", type=int, default=5, help="turns of each side")
    parser.add_argument("--rounds", type=int, default=2, help="rounds in a turn")
    parser.add_argument("--commands", type=int, default=3, help="turns of whole commands (Flower)")
    parser.add_argument("--samples", type=int, default=500, help="of each client")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--environments", type=Path, default=HERE / ".environments")
    parser.add_argument("--make-environments", action="store_true")
    options = parser.parse_args()
    options.environments = options.environments.resolve()
    if options.make_environments:
        return make_environments(options.environments)
    os.environ["WORK_SAMPLES"] = str(options.samples)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: options.cores])
    for row in options.rows:
        for batch in options.batches:
            before = os.getloadavg()[0]
            measured = ROWS[row](batch, options)
            for name, figures in measured.items():
                rounded = {key: round(value, 3) for key, value in figures.items()}
                print(json.dumps({"row": row, "batch": batch, "side": name, **rounded, "load": before}), flush=True)
    return None


if __name__ == "__main__":
    main()
