"""Whatever arrives is checked before it counts: names, shapes, dtypes, and that every number is of use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedkeel.config import from_one
from fedkeel.core.messages import BadMessage, Broadcast, Update, shown, whole_number
from fedkeel.core.state import is_continuous, is_variance

_MAX_SAMPLES = 2**40
_MAX_COUNT = 2**40
_LARGEST = 1e15  # a sum of squares of such numbers is still finite in float32
_MOST_ROWS = 2**14  # of a tensor whose size the server cannot know beforehand
_MOST_METRICS = 100
_LONGEST_NAME = 200  # of a metric


@dataclass(frozen=True)
class Expected:
    """What a tensor of a method's own must look like before the server uses it.

    A word in `shape` is a size that is not known beforehand: the same wherever it stands, and not beyond reason.
    `least` and `most` bound the values.

    Args:
        shape: its sizes.
        dtype: torch's default if it is left out.
        least, most: of its values, if there are such bounds.

    >>> try:
    ...     check_expected({"share": torch.tensor([2.0])}, {"share": Expected(("clients",), most=1)})
    ... except BadMessage as refused:
    ...     print(refused)
    the extra 'share' holds 2, above 1
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    least: float | None = None
    most: float | None = None

    @staticmethod
    def like(name: str, tensor: Tensor) -> Expected:
        """As an entry of the model; a variance is not negative."""
        return Expected(tuple(tensor.shape), tensor.dtype, least=0 if is_variance(name) else None)


def check(update: Update, broadcast: Broadcast) -> None:
    """Raise `BadMessage` unless the update may be averaged into the global model.

    Names, shapes and dtypes as broadcast; every number finite; no negative variance; a plausible number of
    samples; of this round.
    """
    if update.round != broadcast.round:
        raise BadMessage(f"it is of round {from_one(update.round)}, not of round {from_one(broadcast.round)}")
    check_samples(update.samples)
    _check_like("weight", update.weights, broadcast.weights)
    _check_like("statistic", update.statistics, broadcast.statistics)
    for group in (update.weights, update.statistics, update.extras):
        check_finite(group)
    _check_values(update.statistics)
    if len(update.metrics) > _MOST_METRICS:
        raise BadMessage(f"it has {len(update.metrics)} metrics")
    for name, value in update.metrics.items():
        if not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
            raise BadMessage("a metric of it has no name that can be shown")
        if not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:  # nor is what is not a number
            raise BadMessage(f"its metric '{name}' is {shown(value)}")


def check_broadcast(broadcast: Broadcast, weights: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> None:
    """Raise `BadMessage` unless a broadcast is of the model that has these entries."""
    _check_like("weight", broadcast.weights, weights)
    _check_like("statistic", broadcast.statistics, statistics)
    check_finite(broadcast.weights)
    check_finite(broadcast.statistics)


def _check_values(statistics: Mapping[str, Tensor]) -> None:
    """No negative variance; counters that can count on. All are looked at in one go: a GPU is waited for once."""
    variances = {name: t for name, t in statistics.items() if is_variance(name) and t.numel()}
    counters = {name: t.long() for name, t in statistics.items() if not is_continuous(t) and t.numel()}
    bounds = [t.min() for t in variances.values()] + [bound for t in counters.values() for bound in t.aminmax()]
    if not bounds:
        return
    numbers = torch.stack([bound.double() for bound in bounds]).tolist()
    for name, smallest in zip(variances, numbers, strict=False):
        if smallest < 0:
            raise BadMessage(f"the variance '{name}' is negative")
    ranges = zip(numbers[len(variances) :: 2], numbers[len(variances) + 1 :: 2], strict=True)
    for name, (least, most) in zip(counters, ranges, strict=True):
        if least < 0 or most > _MAX_COUNT:
            raise BadMessage(f"the counter '{name}' is {least if least < 0 else most:g}")


def check_samples(samples: object) -> None:
    if not 0 < whole_number(samples, "number of samples") < _MAX_SAMPLES:
        raise BadMessage(f"its number of samples is {shown(samples)}")


def check_expected(tensors: Mapping[str, Tensor], expected: Mapping[str, Expected]) -> None:
    """Raise `BadMessage` unless these are exactly the tensors that a method's own rules can work with.

    That they are finite is known by then: `check_finite`.
    """
    _check_names("extra", tensors, expected)
    sizes: dict[str, int] = {}
    for name, wanted in expected.items():
        tensor = tensors[name]
        sizes_here = zip(wanted.shape, tensor.shape, strict=False)  # a wrong number of them is found below
        shape = tuple(sizes.setdefault(size, given) if isinstance(size, str) else size for size, given in sizes_here)
        if tensor.ndim != len(wanted.shape) or tuple(tensor.shape) != shape:
            text = ", ".join(str(sizes.get(str(size), size)) for size in wanted.shape)
            raise BadMessage(f"the extra '{name}' has shape {tuple(tensor.shape)}, not ({text})")
        if tensor.dtype != wanted.dtype:
            raise BadMessage(f"the extra '{name}' has dtype {tensor.dtype}, not {wanted.dtype}")
    for size in sizes.values():
        if size > _MOST_ROWS:
            raise BadMessage(f"its extras have {size} rows, more than {_MOST_ROWS}")
    for name, wanted in expected.items():
        tensor = tensors[name]
        if not tensor.numel():
            continue
        if wanted.least is not None and bool(tensor.min() < wanted.least):
            raise BadMessage(f"the extra '{name}' holds {tensor.min().item():g}, below {wanted.least:g}")
        if wanted.most is not None and bool(tensor.max() > wanted.most):
            raise BadMessage(f"the extra '{name}' holds {tensor.max().item():g}, above {wanted.most:g}")


def _check_names(kind: str, given: Mapping[str, Tensor], expected: Mapping[str, object]) -> None:
    if given.keys() != expected.keys():
        missing, surplus = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
        raise BadMessage(f"its {kind}s do not match: missing {missing[:3]}, not expected {surplus[:3]}")


def _check_like(kind: str, given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    _check_names(kind, given, expected)
    for name, tensor in given.items():
        like = expected[name]
        if tensor.shape != like.shape:
            raise BadMessage(f"the {kind} '{name}' has shape {tuple(tensor.shape)}, not {tuple(like.shape)}")
        if tensor.dtype != like.dtype:
            raise BadMessage(f"the {kind} '{name}' has dtype {tensor.dtype}, not {like.dtype}")


def size(tensors: Mapping[Any, Tensor]) -> Tensor:
    """The sum of all tensors' norms, on their device: finite if every number is (and none is huge)."""
    floating = [tensor for tensor in tensors.values() if tensor.dtype.is_floating_point and tensor.numel()]
    if not floating:
        return torch.zeros(())
    norms = torch._foreach_norm(floating)
    if len({norm.dtype for norm in norms}) > 1:
        norms = tuple(norm.double() for norm in norms)
    return torch.stack(norms).double().sum()


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    floating = {name: t for name, t in tensors.items() if is_continuous(t) and t.numel()}
    # Only if their norms together are suspicious is each tensor looked at by itself, which also finds the name.
    if not floating or bool(size(floating) < _LARGEST):
        return
    for name, tensor in floating.items():
        if not bool(torch.isfinite(tensor).all()):
            raise BadMessage(f"'{name}' holds a value that is not finite")
        # Finite, but the mean of all clients, or its square, would not be.
        if bool(tensor.abs().max() > _LARGEST):
            raise BadMessage(f"'{name}' holds {tensor.abs().max().item():g}, which is beyond use")
