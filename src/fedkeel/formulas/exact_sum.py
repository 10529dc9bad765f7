"""Sums of updates that do not depend on the order, nor on who added which of them up.

Adding floats rounds after every step, so partial sums of other groups of clients are other numbers in the last bits. In
whole numbers nothing is rounded: nodes add up what their clients send, in whichever order these finish, and the mean of
all is the same bit for bit, however the clients were spread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedkeel.core.state import Tensors, is_continuous

BITS = 62  # of a sum, beside its sign
ROOM = 4  # bits by which a change may be larger than the largest entry of its tensor, or than 1


@dataclass
class ExactSum:
    """The sum of changes, sum_k n_k [2^s (x_k - x_0)], in whole numbers; their mean is x_0 + sum / (2^s n).

    Each tensor has its own s, from its largest entry in x_0 and from the weight n of all who may take part: as fine as
    64 bits allow. For weights around 1 and a million samples that is 2^-38, where float32 has 2^-24. What is finer is
    cut off and not rounded, so that no mean is further from x_0 than its clients are: a variance stays positive. Of
    whole numbers (counters) and truth values the maximum is kept, as in `weighted_mean`.

    Args:
        origin: x_0, what all clients began with.
        most: the weight of all clients that may be added, a whole number.

    >>> start = {"w": torch.tensor([1.0, -1.0])}
    >>> here, there = ExactSum(start, most=4), ExactSum(start, most=4)
    >>> here.add({"w": torch.tensor([3.0, -1.0])}, 1), there.add({"w": torch.tensor([1.0, 0.0])}, 3)
    (True, True)
    >>> here.merge(there.sums, there.weight)
    >>> here.mean()
    {'w': tensor([ 1.5000, -0.2500])}
    """

    origin: Mapping[str, Tensor]
    most: int
    weight: int = 0
    sums: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        room = BITS - ROOM - max(1, self.most).bit_length()
        self._shifts: dict[str, int] = {}
        for name, tensor in self.origin.items():
            if is_continuous(tensor):
                largest = float(_real(tensor).abs().max()) if tensor.numel() else 0.0
                self._shifts[name] = room - max(0, math.frexp(largest)[1])

    @cached_property
    def _start(self) -> Tensor:
        return self._flat(self.origin)

    @cached_property
    def _scale(self) -> Tensor:
        scales = torch.tensor([2.0**shift for shift in self._shifts.values()], dtype=torch.float64)
        sizes = torch.tensor([_real(self.origin[name]).numel() for name in self._shifts], dtype=torch.int64)
        return scales.repeat_interleave(sizes).to(self._start.device)

    def _flat(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """All that is continuous, one after another: a client then costs a few operations, however many layers."""
        parts = [_real(tensors[name].detach()).reshape(-1) for name in self._shifts]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)

    def add(self, tensors: Mapping[str, Tensor], weight: int) -> bool:
        """Count a client in; false, and nothing is counted, where a change of it is too large for that."""
        scaled = self._flat(tensors).sub_(self._start).mul_(self._scale)
        most = 2.0 ** (BITS - max(1, self.most).bit_length())
        if scaled.numel() and not bool((torch.stack(scaled.aminmax()).abs() < most).all()):  # one look at a GPU
            return False
        shapes = [_real(self.origin[name]).shape for name in self._shifts]
        whole = torch.split_with_sizes(scaled.long().mul_(weight), [shape.numel() for shape in shapes])
        changes = {name: part.view(shape) for name, part, shape in zip(self._shifts, whole, shapes, strict=True)}
        self.merge({name: changes.get(name, tensors[name].detach()) for name in self.origin}, weight)
        return True

    def merge(self, sums: Mapping[str, Tensor], weight: int) -> None:
        """Add what another has added up, from the same origin."""
        for name, tensor in sums.items():
            if name not in self.sums:
                self.sums[name] = tensor.clone()
            elif name in self._shifts:
                self.sums[name] += tensor
            else:
                self.sums[name] = torch.maximum(self.sums[name], tensor)
        self.weight += weight

    def mean(self) -> Tensors:
        """Of all that were added; in the dtype of the origin."""
        result: Tensors = {}
        for name, start in self.origin.items():
            total = result[name] = self.sums[name]
            if name in self._shifts:
                whole = torch.div(total, self.weight, rounding_mode="trunc")  # a quotient of floats may be too large
                rest = (total - whole * self.weight).double() / self.weight
                mean = _real(start) + (whole.double() + rest) * 2.0 ** -self._shifts[name]
                result[name] = (torch.view_as_complex(mean) if start.is_complex() else mean).to(start.dtype)
        return result


def _real(tensor: Tensor) -> Tensor:
    """In float64; of complex numbers both parts."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()
