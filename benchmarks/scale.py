"""What very many clients cost: rounds per second and peak memory, a hundred clients a round whatever their number.

    python benchmarks/scale.py [row ...] [--rounds 20]

Made-up images, `simple_cnn`, one process and one thread. Every row runs in a fresh process, so that its peak memory is
its own; the first round, which imports and warms up, is not timed. Checkpoints are written after every round.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import fedkeel
from fedkeel.config import Config
from fedkeel.core.evaluation import Scores
from fedkeel.data import DATASETS, load
from fedkeel.data.dataset import Dataset, Split
from fedkeel.data.transforms import parse_transforms

SAMPLED = 100
TESTS = 500


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    clients: int
    partition: str = "dirichlet(alpha=0.3, clients={clients}, samples=20)"
    images: int = 20_000
    pixels: int = 32
    method: str = "fedavg"


ROWS = {
    "1000": Row(1_000),
    "10000": Row(10_000),
    "100000": Row(100_000),
    "exact": Row(100_000, "even(clients={clients})", images=400_000, pixels=16),
    "remembering": Row(100_000, method="standalone"),
}


class Clock(fedkeel.Observer):
    """When each round was over."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def round_done(self, round: int, rounds: int, scores: Scores | None, loss: float) -> None:
        self.times.append(time.perf_counter())


def made_up(row: Row) -> Dataset:
    """Random images: memory and speed do not depend on what is in them."""
    generator = torch.Generator().manual_seed(0)
    total = row.images + TESTS
    shape = (total, 3, row.pixels, row.pixels)
    return Dataset(
        name="made-up",
        images=torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
        labels=torch.randint(0, 10, (total,), generator=generator),
        classes=tuple(str(label) for label in range(10)),
        domains={"all": Split(torch.arange(row.images), torch.arange(0), torch.arange(row.images, total))},
        train_transform=parse_transforms("normalise"),
        test_transform=parse_transforms("normalise"),
    )


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(name: str, rounds: int) -> dict[str, object]:
    torch.set_num_threads(1)
    row = ROWS[name]
    source = made_up(row)
    DATASETS.register("made-up")(lambda: source)
    before, began = peak(), time.perf_counter()
    federation = load("made-up", partition=row.partition.format(clients=row.clients))
    loaded = time.perf_counter() - began
    config = Config(
        method=row.method,
        model="simple_cnn",
        participation=SAMPLED / len(federation.clients),
        rounds=rounds,
        batch_size=10,
        learning_rate=1e-3,
        evaluate_every=rounds,
        evaluate_clients=10 if row.method == "standalone" else Config().evaluate_clients,
        executor="serial",
        device="cpu",
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        run = fedkeel.simulate(config, directory=Path(folder) / "run", federation=federation, observer=clock)
        files = list((run.directory / "memory").rglob("*.safetensors"))
        on_disk = sum(path.stat().st_size for path in files)
    return {
        "row": name,
        "clients": len(federation.clients),
        "seconds to make the clients": round(loaded, 2),
        "rounds per second": round((rounds - 1) / (clock.times[-1] - clock.times[0]), 2),
        "peak MiB with the images alone": round(before),
        "peak MiB": round(peak()),
        "clients that remember": len({file.parent for file in files}),
        "MiB on disk": round(on_disk / 2**20),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rows", nargs="*", default=list(ROWS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    for name in options.rows:
        if options.here:
            print(json.dumps(measure(name, options.rounds)), flush=True)
        else:
            command = [sys.executable, __file__, name, "--rounds", str(options.rounds), "--here"]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
