"""Random numbers that a step can draw inside a CUDA graph, and that are the same on every device.

A generator of the host cannot be asked inside a graph, and torch's own on the GPU gives other numbers than the one on
the CPU. So the numbers are a function of a key and a counter, both tensors (counter-based generation: Salmon et al.,
"Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011): a hash of integers, exact everywhere. The key comes from a
generator of the host before the round; the counter is advanced on the device, once a step or once a draw.
"""

from __future__ import annotations

from math import pi

import torch
from torch import Tensor

_BITS = 23  # of a uniform number: with half a step added it is exact in float32, and neither 0 nor 1
_WORD = 0xFFFFFFFF
_MULTIPLIER = 0x45D9F3B
"""Folding and multiplying twice by this constant mixes 32 bits well, and its product with 32 bits fits 63."""
_GOLDEN = 0x1E3779B1


def new_key(generator: torch.Generator) -> Tensor:
    """A key from a generator of the host, on the CPU: int64, scalar."""
    return torch.randint(0, 2**31, (), generator=generator)


def mixed_keys(key: Tensor, counter: Tensor) -> Tensor:
    """A key for each number of `counter`, of its shape, from one key."""
    return _mixed(_mixed(key & _WORD) ^ ((counter * _GOLDEN) & _WORD))


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
    bits = _mixed(mixed_keys(key, counter) ^ _mixed(torch.arange(1, count + 1, device=key.device)))
    numbers: Tensor = ((bits >> (32 - _BITS)).float() + 0.5) / 2**_BITS
    return numbers


def normal(key: Tensor, counter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers by Box and Muller's formula: float32, equal on all devices up to rounding."""
    count = torch.Size(shape).numel()
    first, second = uniform(key, counter, 2 * count).view(2, *shape)
    numbers: Tensor = (-2 * first.log()).sqrt() * (2 * pi * second).cos()
    return numbers


def _mixed(x: Tensor) -> Tensor:
    """A one-to-one map of 32 bits, held in int64, after which each depends on all."""
    for _ in range(2):
        x = (x ^ (x >> 16)).mul_(_MULTIPLIER).bitwise_and_(_WORD)
    return x ^ (x >> 16)
