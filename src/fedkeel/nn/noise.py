"""Normal noise that is a function of a seed and a counter, both tensors.

A generator's state lies with the host, and its numbers differ between CPU and GPU. These come from integer arithmetic:
the same bits everywhere, and a captured CUDA graph that advances the counter draws new ones at every replay.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed integer: the increment of SplitMix64
_FIRST, _SECOND = -4658895280553007687, -7723592293110705685  # its multipliers
_BITS = 23  # of a uniform number: (k + 1/2) / 2^23 is exact in single precision and never 0 or 1


def normal_noise(seed: Tensor, counter: Tensor, rows: int, width: int) -> Tensor:
    """Standard normal numbers (rows, width), float32, on the tensors' device; for each (seed, counter) others.

    The first rows do not depend on how many there are. Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators", OOPSLA 2014, made normal by the inverse of the distribution function.

    >>> one, other = torch.tensor(1), torch.tensor(2)
    >>> bool((normal_noise(one, other, 2, 3) == normal_noise(one, other, 5, 3)[:2]).all())
    True
    """
    stream = _mixed(_mixed(seed) + counter * _GOLDEN)
    places = torch.arange(1, rows * width + 1, device=seed.device).view(rows, width)
    high = _shifted(_mixed(stream + places * _GOLDEN), 64 - _BITS)
    uniform = (high.to(torch.float32) + 0.5) / 2**_BITS
    normal: Tensor = torch.special.erfinv(2 * uniform - 1)
    return normal * math.sqrt(2)


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: every bit of the result depends on every bit of x. Products wrap around."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """To the right, with zeros from the left: torch's own shift repeats the sign."""
    return torch.bitwise_right_shift(x, bits) & (1 << (64 - bits)) - 1
