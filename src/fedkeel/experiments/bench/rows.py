"""What is measured: the rows of the tables, their aims, and the made-up federation that they train."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from fedkeel.data.federation import Client, Federation, no_indices
from fedkeel.data.transforms import parse_transforms
from fedkeel.errors import FedkeelError, unknown

AUGMENTATION = "crop(padding=4)+flip+normalise(like=cifar10)"
Group = Literal["cpu", "gpu", "cost", "cell"]
GROUPS: dict[Group, str] = {
    "cpu": "CPU: client-steps per second against the usual loop with all threads",
    "gpu": "One GPU: client-steps per second against the usual loop",
    "cost": "What methods cost on one GPU: steps per second of one client alone",
    "cell": "A whole experiment on one GPU",
}


@dataclass(frozen=True)
class Benchmark:
    """One line of a table, or one for each of `executors`."""

    model: str
    pixels: int
    batch: int
    clients: int
    steps: int  # per client and round
    rounds: int  # that are timed, after those that warm up
    precision: str = "tf32"
    method: str = "fedavg"
    group: Group = "gpu"
    executors: tuple[str, ...] = ("cuda",)
    aim: float | None = None  # the ratio to reach: at least, or for a cost at most; seconds for a cell
    compiled_aim: float | None = None  # the same with `compile`
    against: str = ""  # the method that a cost is measured against
    peer: str = ""  # the other library, whose side runs in an environment of its own

    @property
    def work(self) -> str:
        if self.peer or self.group == "cell":
            return self.model
        clients = "one client" if self.clients == 1 else f"{self.clients} clients"
        precision = "" if self.group == "cpu" else f", {self.precision}"
        return f"{self.model}, {self.pixels} px, batch {self.batch}, {clients}{precision}"

    def quick(self) -> Benchmark:
        """So few steps that it only shows that it works."""
        return replace(self, clients=min(self.clients, 4), steps=min(self.steps, 4), rounds=1)


EPOCH = Benchmark("resnet18", 224, 16, 1, 36, 5)  # the setting of GReg's Table 10
CPU = Benchmark("simple_cnn", 32, 4, 10, 32, 1, group="cpu", executors=("serial", "processes"), aim=1.5)

ROWS = {
    "cpu4": CPU,
    "cpu32": replace(CPU, batch=32, steps=8),
    "pfl": replace(CPU, model="pfl, simple_cnn without norm, batch 4", peer="pfl"),
    "flower": replace(CPU, model="Flower's simulation, simple_cnn, batch 4", peer="flower", aim=2.0),
    "small10": Benchmark("simple_cnn", 32, 4, 10, 125, 4, aim=45, compiled_aim=60),
    "small100": Benchmark("simple_cnn", 32, 4, 100, 125, 2, aim=70),
    "resnet32": Benchmark("resnet18", 32, 64, 10, 16, 5, aim=15),
    "resnet32-bf16": Benchmark("resnet18", 32, 64, 10, 16, 5, precision="bf16"),
    "resnet32small": Benchmark("resnet18(stem=small)", 32, 64, 10, 16, 3, precision="bf16"),
    "resnet224": Benchmark("resnet18", 224, 16, 4, 36, 5, precision="bf16", aim=5),
    "epoch": EPOCH,
    "epoch-bf16": replace(EPOCH, precision="bf16"),
    "greg": replace(EPOCH, method="greg", group="cost", aim=1.35, against="fedavg"),
    "hbn": replace(EPOCH, method="hbn", group="cost", aim=1.5, against="fedavg"),
    # FedWon has no batch norm to begin with: its cost is that of standardising weights.
    "fedwon": replace(EPOCH, method="fedwon", group="cost", aim=1.25, against="fedfn"),
    "hbn-cell": Benchmark(
        "HBN's CIFAR-10 cell for FedAvg, 500 rounds", 32, 4, 100, 125, 500, method="fedavg", group="cell", aim=60
    ),
}


def choose(names: list[str]) -> dict[str, Benchmark]:
    """The rows of these names, or all."""
    for name in names:
        if name not in ROWS:
            raise FedkeelError(unknown("row", name, ROWS))
    return {name: row for name, row in ROWS.items() if not names or name in names}


def made_up(row: Benchmark) -> Federation:
    """Random images: speed does not depend on what is in them."""
    per_client = row.batch * row.steps
    generator = torch.Generator().manual_seed(0)
    total = per_client * row.clients
    shape = (min(total, 20_000), 3, row.pixels, row.pixels)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (len(images),), generator=generator)
    places, test = torch.arange(total) % len(images), torch.arange(min(64, len(images)))
    clients = tuple(
        Client(f"c{i:04d}", "made-up", places[i * per_client : (i + 1) * per_client], no_indices(), test)
        for i in range(row.clients)
    )
    augmentation = AUGMENTATION if row.pixels == 32 else "flip+normalise(like=imagenet)"
    transforms = parse_transforms(augmentation), parse_transforms("normalise(like=cifar10)")
    return Federation("made-up", images, labels, tuple("0123456789"), clients, *transforms)
