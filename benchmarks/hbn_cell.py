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

import numpy as np

import fedkeel
from fedkeel.data.federation import Federation


def random_cifar(folder: Path, partition: str) -> Federation:
    generator = np.random.default_rng(0)
    arrays = {
        "x_cifar10": generator.integers(0, 256, (50_000, 32, 32, 3), dtype=np.uint8),
        "y_cifar10": np.repeat(np.arange(10), 5_000),
        "x_cifar10_test": generator.integers(0, 256, (10_000, 32, 32, 3), dtype=np.uint8),
        "y_cifar10_test": np.repeat(np.arange(10), 1_000),
    }
    np.savez(folder / "random.npz", **arrays)
    return fedkeel.data.load(
        "npz",
        root=str(folder / "random.npz"),
        partition=partition,
        train_transform="crop(padding=4)+flip+normalise(like=cifar10)",
        test_transform="normalise(like=cifar10)",
        validation=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--data", default="random")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    options = parser.parse_args()
    partition = "dirichlet(alpha=0.6, clients=100, minimum=1)"
    with tempfile.TemporaryDirectory() as temporary:
        if options.data == "random":
            federation = random_cifar(Path(temporary), partition)
        else:
            federation = fedkeel.data.load(options.data, partition=partition)
        # A validation set is no part of the cell.
        federation = replace(
            federation, clients=tuple(replace(c, validation=c.validation[:0]) for c in federation.clients)
        )
        began = time.perf_counter()
        run = fedkeel.simulate(
            federation=federation,
            directory=Path(temporary) / "run",
            method=options.method,
            model="simple_cnn",
            rounds=options.rounds,
            participation=0.1,
            batch_size=4,
            learning_rate=options.learning_rate,
            momentum=0.9,
            schedule="exponential",
            clip_norm=10.0,
            evaluate_every=10,
            evaluation_batch=2000,
            checkpoint_every=50,
        )
        seconds = time.perf_counter() - began
        timing = [json.loads(line) for line in (run.directory / "timing.jsonl").read_text().splitlines()]
        phases = {phase: round(sum(t[phase] for t in timing), 2) for phase in ("train", "aggregate", "evaluate")}
        print(json.dumps({"method": options.method, "seconds": round(seconds, 1), **phases, "accuracy": run.accuracy}))


if __name__ == "__main__":
    main()
