"""The only things that travel: Broadcast (server -> client), Update and Answer (client -> server).

They serialise to safetensors: named tensors with a small JSON header, nothing that could run code. Whatever
arrives from a client is checked before it counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fedkeel.config import from_one
from fedkeel.core.naming import visible
from fedkeel.core.state import Tensors, is_continuous, is_variance, nbytes, select

_SEPARATOR = "//"  # between a group ("weights") and a tensor's own name
_MAX_SAMPLES = 2**40
_MAX_COUNT = 2**40
_LARGEST = 1e15  # a sum of squares of such numbers is still finite in float32
_MOST_ROWS = 2**14  # of a tensor whose size the server cannot know beforehand
_MOST_METRICS = 100
_LONGEST_NAME = 200  # of a metric


class BadMessage(ValueError):
    """A message that must not be used; the text says why.

    It may quote the message, whose names are the sender's: in a log they must not be able to move the cursor or pose
    as another line.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(visible(reason[:1000]))


@contextmanager
def reading(what: str = "it cannot be read") -> Iterator[None]:
    """Whatever goes wrong in here is the message's fault, never the reader's.

    The one place that says so: nobody can list what the bytes of a stranger make libraries raise (numbers too large
    for a float, tables too deep, kinds of numbers that torch cannot sort, names that are no text).
    """
    try:
        yield
    except BadMessage:
        raise
    except Exception as error:
        raise BadMessage(f"{what}: {str(error)[:200] or type(error).__name__}") from error


@dataclass(frozen=True)
class Broadcast:
    """What the server sends at the start of a round.

    `rounds` is the number of rounds in all: schedules such as "from the middle on" need it. `extras` are the
    method's own tensors (prototypes, control variates), named `part/name`.
    """

    round: int
    rounds: int
    weights: Tensors
    statistics: Tensors
    extras: Tensors = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return nbytes(self.weights) + nbytes(self.statistics) + nbytes(self.extras)

    def to(self, device: torch.device | str) -> Broadcast:
        def move(tensors: Tensors) -> Tensors:
            return {name: tensor.to(device) for name, tensor in tensors.items()}

        return Broadcast(self.round, self.rounds, move(self.weights), move(self.statistics), move(self.extras))


@dataclass(frozen=True)
class Update:
    """What a client sends back after training."""

    client: str
    samples: int
    weights: Tensors
    statistics: Tensors
    extras: Tensors = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    round: int = 0

    @property
    def nbytes(self) -> int:
        return nbytes(self.weights) + nbytes(self.statistics) + nbytes(self.extras)


@dataclass(frozen=True)
class Answer:
    """What a client sends back when a method asked it something inside a round."""

    client: str
    samples: int
    tensors: Tensors

    @property
    def nbytes(self) -> int:
        return nbytes(self.tensors)


@dataclass(frozen=True)
class Missing:
    """A client whose update or answer did not come, or must not be used, and why."""

    client: str
    reason: str


@dataclass(frozen=True)
class Expected:
    """What a tensor of a method's own must look like before the server uses it.

    A word in `shape` is a size that is not known beforehand: the same wherever it stands, and not beyond reason.
    `least` and `most` bound the values.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype = torch.float32
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
    _check_values(update.statistics)
    check_finite(update.extras)
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
    if not 0 < _whole(samples, "number of samples") < _MAX_SAMPLES:
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
    check_finite(given)


def size(tensors: Mapping[str, Tensor]) -> Tensor:
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
    if not floating:
        return
    # Only if their norms together are suspicious is each tensor looked at by itself, which also finds the name.
    if bool(size(floating) < _LARGEST):
        return
    for name, tensor in floating.items():
        if not bool(torch.isfinite(tensor).all()):
            raise BadMessage(f"'{name}' holds a value that is not finite")
        # Finite, but the mean of all clients, or its square, would not be.
        if bool(tensor.abs().max() > _LARGEST):
            raise BadMessage(f"'{name}' holds {tensor.abs().max().item():g}, which is beyond use")


def pack(header: Mapping[str, Any], **groups: Mapping[str, Tensor]) -> bytes:
    """Serialise groups of named tensors with a JSON header.

    Safetensors sorts by dtype and name. The order goes along, because sums over tensors depend on it: a client must
    compute the same bits whether its message came through memory, a pipe or a checkpoint.
    """
    flat: Tensors = {}
    seen: set[int] = set()
    for group, tensors in groups.items():
        for name, given in tensors.items():
            tensor = given.detach().cpu().contiguous()
            storage = tensor.untyped_storage().data_ptr()
            # Two names of one memory (tied weights) are two tensors on the wire.
            flat[f"{group}{_SEPARATOR}{name}"] = tensor.clone() if storage in seen else tensor
            seen.add(storage)
    return safetensors.torch.save(flat, metadata={"header": json.dumps(header), "order": json.dumps(list(flat))})


def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, Tensors]]:
    """The inverse of `pack`; raises `BadMessage` on anything that is not one."""
    with reading():
        tensors = safetensors.torch.load(data)
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length])["__metadata__"]
        header, order = json.loads(metadata["header"]), json.loads(metadata["order"])
        if sorted(order) != sorted(tensors):
            raise BadMessage("its list of tensors is not that of the tensors in it")
        groups: dict[str, Tensors] = {}
        for key in order:
            group, separator, name = key.partition(_SEPARATOR)
            if not separator:
                raise BadMessage(f"the tensor '{key}' belongs to no group")
            groups.setdefault(group, {})[name] = tensors[key]
    if not isinstance(header, dict):
        raise BadMessage("its header is not a table")
    return header, groups


def broadcast_to_bytes(message: Broadcast) -> bytes:
    header = {"round": message.round, "rounds": message.rounds}
    return pack(header, weights=message.weights, statistics=message.statistics, extras=message.extras)


def broadcast_from_bytes(data: bytes) -> Broadcast:
    header, groups = unpack(data)
    with reading("its header cannot be read"):
        return Broadcast(
            round=int(header["round"]),
            rounds=int(header["rounds"]),
            weights=groups.get("weights", {}),
            statistics=groups.get("statistics", {}),
            extras=groups.get("extras", {}),
        )


def update_to_bytes(message: Update) -> bytes:
    header = {
        "client": message.client,
        "samples": message.samples,
        "round": message.round,
        "metrics": message.metrics,
    }
    return pack(header, weights=message.weights, statistics=message.statistics, extras=message.extras)


def update_from_bytes(data: bytes) -> Update:
    header, groups = unpack(data)
    with reading("its header cannot be read"):
        return Update(
            client=str(header["client"]),
            samples=_whole(header["samples"], "number of samples"),
            round=_whole(header["round"], "round"),
            metrics={str(name): float(value) for name, value in dict(header["metrics"]).items()},
            weights=groups.get("weights", {}),
            statistics=groups.get("statistics", {}),
            extras=groups.get("extras", {}),
        )


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(value: object, what: str) -> int:
    if not is_whole(value):
        raise BadMessage(f"its {what} is not an integer but {shown(value)}")
    return value  # type: ignore[return-value]


def shown(value: object) -> str:
    """What was given, where that is short enough to be told."""
    if isinstance(value, (list, tuple, dict)) and len(value) > 9:
        return f"{len(value):,} entries"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text):,} characters)"


def scoped_updates(updates: Sequence[Update], part: str) -> list[Update]:
    """The updates with only this part's extras."""
    return [replace(update, extras=select(update.extras, part)) for update in updates]
