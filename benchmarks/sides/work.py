"""The work that every side of `cpu.py` does: HBN's CIFAR network on ten clients of 500 random images, plain PyTorch.

Nothing here needs Fedkeel: the other sides live in environments of their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLIENTS, SAMPLES = 10, int(os.environ.get("WORK_SAMPLES", "500"))
LEARNING_RATE, MOMENTUM = 1e-3, 0.9
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)


class SimpleCNN(nn.Module):
    """The same layers under the same names as Fedkeel's `simple_cnn`; `norm=False` leaves batch norm out."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        self.encoder = nn.Module()
        for number, (inputs, outputs) in enumerate(((3, 16), (16, 32), (32, 64)), 1):
            self.encoder.add_module(f"conv{number}", nn.Conv2d(inputs, outputs, 3, padding=1))
            self.encoder.add_module(f"bn{number}", nn.BatchNorm2d(outputs) if norm else nn.Identity())
        self.encoder.fc1 = nn.Linear(64 * 4 * 4, 128)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        e = self.encoder
        x = F.max_pool2d(F.relu(e.bn1(e.conv1(x))), 2)
        x = F.max_pool2d(F.relu(e.bn2(e.conv2(x))), 2)
        x = F.max_pool2d(F.relu(e.bn3(e.conv3(x))), 2)
        return self.head(F.relu(e.fc1(x.flatten(1))))


def images_and_labels() -> tuple[Tensor, Tensor]:
    """uint8 images (CLIENTS * SAMPLES, 3, 32, 32) and labels: time does not depend on what is in them."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (CLIENTS * SAMPLES, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return images, torch.arange(CLIENTS * SAMPLES) % 10


def normalised(images: Tensor) -> Tensor:
    return (images.float() / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def of_client(client: int) -> slice:
    return slice(client * SAMPLES, (client + 1) * SAMPLES)


def rounds_on_demand(one_round: Callable[[], None]) -> None:
    """Read a number of rounds from each line of stdin, run them, and answer with the seconds of the clock and of the
    CPU that they took."""
    for line in sys.stdin:
        began, used = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            one_round()
        seconds, cpu = time.perf_counter() - began, time.process_time() - used
        print(json.dumps({"seconds": seconds, "cpu": cpu}), flush=True)
