"""Random numbers that a step can draw inside a CUDA graph, the same on every device; and dropout by them.

All clients that train side by side on a GPU would share torch's generator there. So a layer that draws there holds a
key of its client and a counter, both tensors, and its numbers are a hash of them (counter-based generation: Salmon et
al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). A captured step finds both where they were, and draws anew
at every replay.
"""

import math

import torch
from torch import Tensor, nn

from fedkeel.nn.surgery import replace_modules

_BITS = 23  # of a uniform number: with half a step added it is exact in float32, and neither 0 nor 1
_WORD = 0xFFFFFFFF
_MULTIPLIER = 0x45D9F3B
"""Folding and multiplying twice by this constant mixes 32 bits well, and its product with 32 bits fits 63."""
_GOLDEN = 0x1E3779B1
TORCHS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def uniform(key: Tensor, counter: Tensor, count: int) -> Tensor:
    """Numbers between 0 and 1, neither included: (count,), float32, the same for the same key and counter.

    Args:
        key, counter: int64, scalars, on the device of the result.

    >>> key, counter = torch.tensor(7), torch.tensor(0)
    >>> torch.equal(uniform(key, counter, 3), uniform(key, counter, 5)[:3])
    True
    >>> torch.equal(uniform(key, counter, 3), uniform(key, counter + 1, 3))
    False
    """
    stream = _mixed(_mixed(key & _WORD) ^ ((counter * _GOLDEN) & _WORD))
    bits = _mixed(stream ^ _mixed(torch.arange(1, count + 1, device=key.device)))
    numbers: Tensor = ((bits >> (32 - _BITS)).float() + 0.5) / 2**_BITS
    return numbers


def normal(key: Tensor, counter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers by Box and Muller's formula: float32, equal on all devices up to rounding."""
    first, second = uniform(key, counter, 2 * math.prod(shape)).view(2, *shape)
    numbers: Tensor = (-2 * first.log()).sqrt() * (2 * math.pi * second).cos()
    return numbers


def _mixed(x: Tensor) -> Tensor:
    """A one-to-one map of 32 bits, held in int64, after which each depends on all."""
    for _ in range(2):
        x = (x ^ (x >> 16)).mul_(_MULTIPLIER).bitwise_and_(_WORD)
    return x ^ (x >> 16)


class Draws(nn.Module):
    """A layer that draws by itself: the key of the client under way, and how often it has drawn."""

    key: Tensor
    counter: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("key", "counter"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64), persistent=False)

    def begin(self, generator: torch.Generator) -> None:
        """What is drawn from here on follows from this generator of the host."""
        self.key.fill_(int(torch.randint(0, 2**31, (), generator=generator)))  # a copy would wait for the GPU
        self.counter.zero_()

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """The next numbers between 0 and 1: float32, of the given shape."""
        drawn = uniform(self.key, self.counter, math.prod(shape)).view(shape)
        self.counter.add_(1)
        return drawn


class Dropout(Draws):
    """As `nn.Dropout`, or with `channels` as `nn.Dropout2d`, with masks of its own; not under gradient checkpointing,
    which runs a layer a second time and would get another mask."""

    def __init__(self, p: float, channels: bool = False) -> None:
        super().__init__()
        self.p, self.channels = p, channels

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        shape = (*x.shape[:2], *[1] * (x.ndim - 2)) if self.channels else tuple(x.shape)
        return x * (self.uniform(shape) >= self.p) * (1 / (1 - self.p) if self.p < 1 else 0.0)


def own_dropout(model: nn.Module) -> list[Dropout]:
    """Put a `Dropout` in the place of each of torch's dropout layers that drop something, in a model whose clients run
    side by side; all that are there, in the model's order.

    >>> own_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))[0].p
    0.5
    """

    def rate(module: nn.Module) -> float:
        return float(getattr(module, "p", 0.0)) if type(module) in TORCHS else 0.0

    replace_modules(model, lambda _, m: rate(m) > 0, lambda _, m: Dropout(rate(m), type(m) is not nn.Dropout))
    return [module for module in model.modules() if isinstance(module, Dropout)]
