"""What a method computes, in a few numbers: its losses on a small problem that is always the same.

A ledger keeps results for months, in which methods are corrected. A digest of their code would change with every new
name in it, and with Python's version; what they compute changes only when they do. The images and the weights at the
start are sines, all is computed in double precision, so that no machine's rounding is seen, and there are four rounds,
so that also what a method does from the middle of a run on is in its numbers.
"""

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.core.types import Classifier
from fedkeel.data.federation import Client, Federation
from fedkeel.models.encoder import Encoder, classify
from fedkeel.observer import Observer
from fedkeel.simulation import simulate
from fedkeel.stopping import Stopped, stop_requested

DIGITS = 6  # that are kept
TOLERANCE = 1e-5  # relative
CLIENTS, CLASSES, PIXELS = 3, 4, 8
SPLITS = (20, 4, 8)  # training, validation and test images of a client


Signature = tuple[float | None, ...]


@cache
def signature(method: str) -> Signature:
    """The losses of every round in training and in the test, None where one is no finite number. The same on every
    machine, as `same` compares them. Of a method that does not run on the small problem it is a single None."""
    try:
        return _losses(method)
    except Stopped:
        raise
    except Exception:  # whatever it is that this method, somebody's own perhaps, wants of its data or model
        return (None,)


def _losses(method: str) -> Signature:
    with tempfile.TemporaryDirectory() as folder, _apart():
        run = simulate(
            federation=_federation(),
            model=_network(),
            method=method,
            directory=Path(folder) / "run",
            rounds=4,
            batch_size=10,
            learning_rate=0.05,
            evaluate_with="global",
            executor="serial",
            device="cpu",
            threads=1,
            observer=_Silent(),
        )
        losses = [record["loss"] for record in chain(run.records("round"), run.scores())]
    return tuple(None if loss is None else float(f"{loss:.{DIGITS}g}") for loss in losses)


@contextmanager
def _apart() -> Iterator[None]:
    """In double precision, and nothing to do with what else goes on here: runs that are asked to stop, and threads."""
    dtype, threads, stopping = torch.get_default_dtype(), torch.get_num_threads(), stop_requested.is_set()
    torch.set_default_dtype(torch.float64)
    stop_requested.clear()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)
        if stopping:
            stop_requested.set()


class _Silent(Observer):
    def note(self, text: str) -> None: ...


def same(one: Sequence[float | None], other: Sequence[float | None]) -> bool:
    """Whether two signatures are of the same method. Nothing is not the same as nothing."""
    pairs = zip(one, other, strict=False)
    alike = (a == b or (None not in (a, b) and math.isclose(a or 0, b or 0, rel_tol=TOLERANCE)) for a, b in pairs)
    return len(one) == len(other) > 0 and all(alike)


class _Probe(Encoder):
    """A little of everything: layers by the names that the papers' options use, batch norm, a fully connected layer."""

    def __init__(self) -> None:
        super().__init__(feature_dim=24)
        channels = (3, 16, 16, 16, 16, 16)
        for number, (inputs, outputs) in enumerate(pairwise(channels), start=1):
            self.add_module(f"conv{number}", nn.Conv2d(inputs, outputs, 3, padding=1))
            self.add_module(f"bn{number}", nn.BatchNorm2d(outputs))
        self.fc1 = nn.Linear(16 * 4, 24)

    def extract(self, x: Tensor) -> Tensor:
        for number in range(1, 6):
            x = F.relu(self.get_submodule(f"bn{number}")(self.get_submodule(f"conv{number}")(x)))
            x = F.avg_pool2d(x, 2) if number in (2, 4) else x
        return F.relu(self.fc1(x.flatten(1)))


def _network() -> Classifier:
    network = classify(_Probe(), CLASSES, 24)
    with torch.no_grad():
        for number, layer in enumerate(network.modules()):
            if isinstance(layer, nn.Conv2d | nn.Linear):
                places = torch.arange(float(layer.weight.numel())).view_as(layer.weight)
                layer.weight.copy_(torch.sin(1.7 * number + 12.9898 * places) * math.sqrt(3 / layer.weight[0].numel()))
                nn.init.zeros_(layer.get_parameter("bias"))
    return network


def _federation() -> Federation:
    size = sum(SPLITS)
    number = torch.arange(float(CLIENTS * size)).view(-1, 1, 1, 1)
    labels = torch.arange(CLIENTS * size) % CLASSES
    label, client = labels.view(-1, 1, 1, 1), number // size
    channel, y, x = (torch.arange(float(n)).view(shape) for n, shape in _AXES)
    shown = torch.sin((0.5 + 0.6 * label) * x + 0.4 * channel * y + 0.2 * number)
    noise = torch.sin(12.9898 * number + 78.233 * x + 37.719 * y + 4.581 * channel)
    images = (110 + 20 * client + 55 * shown + 30 * noise).clamp(0, 255).to(torch.uint8)
    ends = [0, SPLITS[0], SPLITS[0] + SPLITS[1], size]
    clients = [
        Client(
            f"client{k}",
            f"domain{k}",
            *(torch.arange(k * size + a, k * size + b) for a, b in pairwise(ends)),
        )
        for k in range(CLIENTS)
    ]
    return Federation("probe", images, labels, tuple("abcd"), clients, _Doubles(), _Doubles())


class _Doubles:
    draws = 0

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        return x.double() / 127.5 - 1


_AXES = ((3, (1, 3, 1, 1)), (PIXELS, (1, 1, PIXELS, 1)), (PIXELS, (1, 1, 1, PIXELS)))
