"""Wall clock of the whole of HBN's CIFAR-10 cell: 500 rounds, 100 clients, 10 a round, batch 4, evaluation every 10.

    python benchmarks/hbn_cell.py [--method fedavg] [--rounds 500] [--data cifar10]

Without `--data cifar10` the images are random, of CIFAR-10's shapes and numbers, cut by the same Dirichlet partition:
time does not depend on what is in them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gpu import AUGMENTATION

from fedkeel import data
from fedkeel.config import Config
from fedkeel.data.federation import Federation
from fedkeel.runs.timing import read_timing
from fedkeel.simulation import simulate

PARTITION = "dirichlet(alpha=0.6, clients=100, minimum=1)"
CELL = Config(model="simple_cnn", participation=0.1, batch_size=4, momentum=0.9, clip_norm=10.0, evaluate_every=10)
CELL = CELL.replace(schedule="exponential", evaluation_batch=2000, checkpoint_every=50)


def random_cifar(folder: Path, images: int) -> Federation:
    """Random images of CIFAR-10's shapes and numbers, cut as the cell cuts it: time does not depend on the images."""
    generator = np.random.default_rng(0)
    arrays = {}
    for ending, count in (("", images), ("_test", images // 5)):
        arrays[f"x_cifar10{ending}"] = generator.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
        arrays[f"y_cifar10{ending}"] = np.repeat(np.arange(10), count // 10)
    np.savez(folder / "random.npz", **arrays)
    options: dict[str, Any] = {"train_transform": AUGMENTATION, "test_transform": "normalise(like=cifar10)"}
    return data.load("npz", root=str(folder / "random.npz"), partition=PARTITION, validation=0, **options)


def run_cell(
    *,
    method: str = "fedavg",
    rounds: int = 500,
    data_set: str = "random",
    images: int = 50_000,
    **options: Any,
) -> dict[str, Any]:
    """Train the cell; its seconds, those of its phases, and its accuracy. Reading the images is not counted."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        is_random = data_set == "random"
        federation = random_cifar(folder, images) if is_random else data.load(data_set, partition=PARTITION)
        # A validation set is no part of the cell.
        clients = tuple(replace(client, validation=client.validation[:0]) for client in federation.clients)
        federation = replace(federation, clients=clients)
        began = time.perf_counter()
        run = simulate(
            CELL.replace(**options),
            verbose=False,
            federation=federation,
            directory=folder / "run",
            method=method,
            rounds=rounds,
        )
        seconds = time.perf_counter() - began
        timing = read_timing(run.directory)
        phases = {phase: round(sum(t[phase] for t in timing), 2) for phase in ("train", "aggregate", "evaluate")}
        return {"method": method, "seconds": round(seconds, 1), **phases, "accuracy": run.accuracy}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--data", dest="data_set", default="random")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    print(json.dumps(run_cell(**vars(parser.parse_args()))))


if __name__ == "__main__":
    main()
