"""What a method and a network compute, in a few numbers: losses and outputs on problems that are always the same.

A ledger keeps results for months, in which methods are corrected. A digest of their code would change with every new
name in it, and with Python's version; what they compute changes only when they do. The images and the weights at the
start are sines, all is computed in double precision, so that no machine's rounding is seen, and there are four rounds,
so that also what a method does from the middle of a run on is in its numbers.
"""

import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import accumulate, chain, pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.core.state import batch_norms
from fedkeel.core.types import Classifier
from fedkeel.data.federation import Client, Federation
from fedkeel.errors import FedkeelError, ShortageError
from fedkeel.models import build_spec
from fedkeel.models.encoder import Encoder, classify
from fedkeel.observer import Observer
from fedkeel.simulation import simulate
from fedkeel.stopping import Stopped, stop_requested

log = logging.getLogger("fedkeel")

DIGITS = 6  # that are kept
TOLERANCE = 1e-5  # relative
CLASSES, PIXELS = 4, 8
# Training, validation and test images of each client: also what a method does from so many images on is to be seen.
CLIENTS = ((72, 8, 8), (40, 8, 8), (20, 8, 8))
ROUNDS = 4

Signature = tuple[float | None, ...]


def signature(method: str, model: str) -> Signature:
    """What the two compute, None where that is no finite number, or cannot be computed here: somebody's own method may
    want other data, and a network its weights from elsewhere. The same on every machine, as `same` compares them."""
    return *_of(_losses, method, 2 * ROUNDS), *_of(_outputs, model, 2)


@cache
def _of(compute: Callable[[str], Signature], text: str, numbers: int) -> Signature:
    try:
        with _apart():
            return compute(text)
    except (Stopped, OSError, MemoryError, ShortageError):
        raise
    except Exception as error:
        log.info("What '%s' computes is not known here: %s", text, error)
        return (None,) * numbers


@torch.no_grad()
def _outputs(model: str) -> Signature:
    """Means over the squared logits of two images, under running and under batch statistics, without dropout."""
    network, pixels = _built(model)
    _weigh(network)
    images = _sines(torch.arange(2.0).view(-1, 1, 1, 1), torch.arange(2).view(-1, 1, 1, 1), pixels)
    under_running = network.eval()(images).logits.square().mean()
    for layer in batch_norms(network).values():
        layer.train()
    return tuple(_kept(float(mean)) for mean in (under_running, network(images).logits.square().mean()))


def _built(model: str) -> tuple[Classifier, int]:
    """For small images, or, where a network refuses these, for larger ones."""
    try:
        return build_spec(model, num_classes=CLASSES, image_size=32), 32
    except FedkeelError:
        return build_spec(model, num_classes=CLASSES, image_size=96), 96


def _kept(number: float | None) -> float | None:
    return float(f"{number:.{DIGITS}g}") if number is not None and math.isfinite(number) else None


def _losses(method: str) -> Signature:
    """Of every round, in training and in the test."""
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(
            verbose=False,
            federation=_federation(),
            model=_network(),
            method=method,
            directory=Path(folder) / "run",
            rounds=ROUNDS,
            batch_size=32,
            learning_rate=0.01,
            evaluate_with="global",
            executor="serial",
            device="cpu",
            threads=1,
            observer=_Silent(),
        )
        losses = [record["loss"] for record in chain(run.records("round"), run.scores())]
    return tuple(_kept(loss) for loss in losses)


@contextmanager
def _apart() -> Iterator[None]:
    """In double precision, and nothing to do with runs that are asked to stop meanwhile."""
    dtype, stopping = torch.get_default_dtype(), stop_requested.is_set()
    torch.set_default_dtype(torch.float64)
    stop_requested.clear()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if stopping:
            stop_requested.set()


class _Silent(Observer):
    def note(self, text: str) -> None: ...


def same(one: Sequence[float | None], other: Sequence[float | None]) -> bool:
    """Whether two signatures are of the same method and network, as far as both are known. None is not."""
    known = [(a, b) for a, b in zip(one, other, strict=False) if a is not None and b is not None]
    return len(one) == len(other) > 0 and all(math.isclose(a, b, rel_tol=TOLERANCE) for a, b in known)


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
    _weigh(network)
    return network


@torch.no_grad()
def _weigh(network: nn.Module) -> None:
    """Weights that are sines, as large as those that networks start from."""
    for number, weight in enumerate(network.parameters(), start=1):
        places = torch.arange(float(weight.numel())).view_as(weight)
        wave = torch.sin(1.7 * number + 12.9898 * places)
        weight.copy_(wave * math.sqrt(3 / weight[0].numel()) if weight.ndim > 1 else weight.new_ones(()) + 0.1 * wave)


def _federation() -> Federation:
    sizes = [sum(splits) for splits in CLIENTS]
    number = torch.arange(float(sum(sizes))).view(-1, 1, 1, 1)
    labels = torch.arange(sum(sizes)) % CLASSES
    domain = torch.repeat_interleave(torch.arange(float(len(sizes))), torch.tensor(sizes)).view(-1, 1, 1, 1)
    shown = _sines(number, labels.view(-1, 1, 1, 1), PIXELS)
    images = (110 + 20 * domain + 85 * shown).clamp(0, 255).to(torch.uint8)
    ends = list(accumulate(chain([0], *CLIENTS)))
    parts = [torch.arange(start, stop) for start, stop in pairwise(ends)]
    clients = [Client(f"client{k}", f"domain{k}", *parts[3 * k : 3 * k + 3]) for k in range(len(CLIENTS))]
    return Federation("probe", images, labels, tuple("abcd"), clients, _Doubles(), _Doubles())


def _sines(number: Tensor, label: Tensor, pixels: int) -> Tensor:
    """Waves whose length is that of their class, and others across them: (N, 3, pixels, pixels), from -1 to 1."""
    side = torch.arange(float(pixels))
    channel, y, x = torch.arange(3.0).view(1, 3, 1, 1), side.view(1, 1, -1, 1), side.view(1, 1, 1, -1)
    shown = torch.sin((0.5 + 0.6 * label) * x + 0.4 * channel * y + 0.2 * number)
    noise = torch.sin(12.9898 * number + 78.233 * x + 37.719 * y + 4.581 * channel)
    return (2 * shown + noise) / 3


class _Doubles:
    draws = 0

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        return x.double() / 127.5 - 1
