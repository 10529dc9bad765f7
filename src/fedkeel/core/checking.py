"""Whatever arrives is checked before it counts: names, shapes, dtypes, and that every number is of use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedkeel.config import from_one
from fedkeel.core.messages import BadMessage, Broadcast, Update, shown, whole_number
from fedkeel.core.state import is_continuous, is_variance

_MOST = 2**40  # samples, or steps of a counter
_LARGEST = 1e15  # a sum of squares of such numbers is still finite in float32
_MOST_ROWS = 2**14  # of a tensor whose size the server cannot know beforehand
_MOST_METRICS = 100


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
    for group in update.groups.values():
        check_finite(group)
    variances = {name: t for name, t in update.statistics.items() if is_variance(name)}
    if name := _first(variances, lambda t: (t < 0).any()):
        raise BadMessage(f"the variance '{name}' is negative")
    counters = {name: t for name, t in update.statistics.items() if not is_continuous(t)}
    if name := _first(counters, lambda t: ((t < 0) | (t > _MOST)).any()):
        raise BadMessage(f"the counter '{name}' is {shown(counters[name].tolist())}")
    if len(update.metrics) > _MOST_METRICS:
        raise BadMessage(f"it has {len(update.metrics)} metrics")
    for name, value in update.metrics.items():
        if not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:  # nor is what is not a number
            raise BadMessage(f"its metric '{name}' is {shown(value)}")


def check_broadcast(broadcast: Broadcast, weights: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> None:
    """Raise `BadMessage` unless a broadcast is of the model that has these entries."""
    _check_like("weight", broadcast.weights, weights)
    _check_like("statistic", broadcast.statistics, statistics)
    check_finite(broadcast.weights)
    check_finite(broadcast.statistics)


def check_samples(samples: object) -> None:
    if not 0 < whole_number(samples, "number of samples") < _MOST:
        raise BadMessage(f"its number of samples is {shown(samples)}")


def check_expected(tensors: Mapping[str, Tensor], expected: Mapping[str, Expected]) -> None:
    """Raise `BadMessage` unless these are exactly the tensors that a method's own rules can work with.

    That they are finite is known by then: `check_finite`.
    """
    _check_names("extra", tensors, expected)
    sizes: dict[int | str, int] = {}  # of the words in the shapes
    for name, wanted in expected.items():
        tensor = tensors[name]
        for size, given in zip(wanted.shape, tensor.shape, strict=False):
            sizes.setdefault(size, given if isinstance(size, str) else size)
        _check_form("extra", name, tensor, tuple(sizes.get(size, size) for size in wanted.shape), wanted.dtype)
        if not tensor.numel():
            continue
        if wanted.least is not None and bool(tensor.min() < wanted.least):
            raise BadMessage(f"the extra '{name}' holds {tensor.min().item():g}, below {wanted.least:g}")
        if wanted.most is not None and bool(tensor.max() > wanted.most):
            raise BadMessage(f"the extra '{name}' holds {tensor.max().item():g}, above {wanted.most:g}")
    for size, rows in sizes.items():
        if isinstance(size, str) and rows > _MOST_ROWS:
            raise BadMessage(f"its extras have {rows} rows, more than {_MOST_ROWS}")


def _check_names(kind: str, given: Mapping[str, Tensor], expected: Mapping[str, object]) -> None:
    if given.keys() != expected.keys():
        missing, surplus = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
        raise BadMessage(f"its {kind}s do not match: missing {missing[:3]}, not expected {surplus[:3]}")


def _check_form(kind: str, name: str, given: Tensor, shape: tuple[int | str, ...], dtype: torch.dtype) -> None:
    if tuple(given.shape) != shape:
        raise BadMessage(f"the {kind} '{name}' has shape {tuple(given.shape)}, not {shape}")
    if given.dtype != dtype:
        raise BadMessage(f"the {kind} '{name}' has dtype {given.dtype}, not {dtype}")


def _check_like(kind: str, given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    _check_names(kind, given, expected)
    for name, tensor in given.items():
        _check_form(kind, name, tensor, tuple(expected[name].shape), expected[name].dtype)


def size(tensors: Mapping[Any, Tensor]) -> Tensor:
    """The sum of all tensors' norms, on their device: finite if every number is (and none is huge)."""
    floating = [tensor for tensor in tensors.values() if tensor.dtype.is_floating_point and tensor.numel()]
    if not floating:
        return torch.zeros(())
    return torch.stack([norm.double() for norm in torch._foreach_norm(floating)]).sum()


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    # Only if their norms together are suspicious is each tensor looked at by itself, which also finds the name.
    if bool(size(tensors) < _LARGEST):
        return
    floating = {name: tensor for name, tensor in tensors.items() if is_continuous(tensor)}
    if name := _first(floating, lambda t: ~torch.isfinite(t).all()):
        raise BadMessage(f"'{name}' holds a value that is not finite")
    # Finite, but the mean of all clients, or its square, would not be.
    if name := _first(floating, lambda t: (t.abs() > _LARGEST).any()):
        raise BadMessage(f"'{name}' holds {floating[name].abs().max().item():g}, which is beyond use")


def _first(tensors: Mapping[str, Tensor], is_bad: Callable[[Tensor], Tensor]) -> str:
    """The name of the first of these that is bad, or none. All are looked at in one go: a GPU is waited for once."""
    found = torch.stack([is_bad(tensor) for tensor in tensors.values()]).tolist() if tensors else []
    return next((name for name, bad in zip(tensors, found, strict=True) if bad), "")
