"""The whole of HBN's CIFAR-10 cell: 100 clients, 10 a round, batch 4, evaluation every 10 rounds."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import fedkeel
from fedkeel.data.federation import Federation

PARTITION = "dirichlet(alpha=0.6, clients=100, minimum=1)"


def random_cifar(folder: Path, *, images: int = 50_000) -> Federation:
    """Random images of CIFAR-10's shapes and numbers, cut as the cell cuts it: time does not depend on the images."""
    generator = np.random.default_rng(0)
    tests = images // 5
    arrays = {
        "x_cifar10": generator.integers(0, 256, (images, 32, 32, 3), dtype=np.uint8),
        "y_cifar10": np.repeat(np.arange(10), images // 10),
        "x_cifar10_test": generator.integers(0, 256, (tests, 32, 32, 3), dtype=np.uint8),
        "y_cifar10_test": np.repeat(np.arange(10), tests // 10),
    }
    np.savez(folder / "random.npz", **arrays)  # type: ignore[arg-type]
    return fedkeel.data.load(
        "npz",
        root=str(folder / "random.npz"),
        partition=PARTITION,
        train_transform="crop(padding=4)+flip+normalise(like=cifar10)",
        test_transform="normalise(like=cifar10)",
        validation=0,
    )


def run_cell(
    *,
    method: str = "fedavg",
    rounds: int = 500,
    data: str = "random",
    learning_rate: float = 0.01,
    images: int = 50_000,
    observer: fedkeel.Observer | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train the cell; its seconds, those of its phases, and its accuracy. Reading the images is not counted."""
    with tempfile.TemporaryDirectory() as temporary:
        if data == "random":
            federation = random_cifar(Path(temporary), images=images)
        else:
            federation = fedkeel.data.load(data, partition=PARTITION)
        # A validation set is no part of the cell.
        clients = tuple(replace(client, validation=client.validation[:0]) for client in federation.clients)
        began = time.perf_counter()
        run = fedkeel.simulate(
            federation=replace(federation, clients=clients),
            directory=Path(temporary) / "run",
            observer=observer,
            method=method,
            rounds=rounds,
            learning_rate=learning_rate,
            **{
                "model": "simple_cnn",
                "participation": 0.1,
                "batch_size": 4,
                "momentum": 0.9,
                "schedule": "exponential",
                "clip_norm": 10.0,
                "evaluate_every": 10,
                "evaluation_batch": 2000,
                "checkpoint_every": 50,
                **options,
            },
        )
        seconds = time.perf_counter() - began
        timing = [json.loads(line) for line in (run.directory / "timing.jsonl").read_text().splitlines()]
        phases = {phase: round(sum(t[phase] for t in timing), 2) for phase in ("train", "aggregate", "evaluate")}
        return {"method": method, "seconds": round(seconds, 1), **phases, "accuracy": run.accuracy}
