"""The only things that travel: Broadcast (server -> client), Update and Answer (client -> server).

They serialise to safetensors: named tensors with a small JSON header, nothing that could run code. What arrives is
checked before it counts: `core.checking`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from fedkeel.core.naming import visible
from fedkeel.core.state import Tensors, nbytes, select, to_device

__all__ = ["Answer", "BadMessage", "Broadcast", "Message", "Update", "pack", "unpack"]

M = TypeVar("M", bound="Message")
GROUPS = ("weights", "statistics", "extras", "tensors")  # what of a message is tensors
_SEPARATOR = "//"  # between a group ("weights") and a tensor's own name


class BadMessage(ValueError):
    """A message that must not be used; the text says why.

    It may quote the message, whose names are the sender's: in a log they must not be able to move the cursor or pose
    as another line.

    >>> unpack(b"not a message")
    Traceback (most recent call last):
    fedkeel.core.messages.BadMessage: it cannot be read: ...
    """

    def __init__(self, reason: str) -> None:
        super().__init__(visible(reason[:1000]))


@contextmanager
def reading(what: str = "it cannot be read") -> Iterator[None]:
    """Whatever goes wrong in here is the message's fault, never the reader's: nobody can list what the bytes of a
    stranger make libraries raise."""
    try:
        yield
    except BadMessage:
        raise
    except Exception as error:
        raise BadMessage(f"{what}: {str(error)[:200] or type(error).__name__}") from error


@dataclass(frozen=True)
class Message:
    """What travels: groups of named tensors, and a header of all else; see `Broadcast` and `Update`."""

    @property
    def groups(self) -> dict[str, Tensors]:
        return {name: value for name, value in vars(self).items() if name in GROUPS}

    @property
    def header(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in GROUPS}

    @property
    def nbytes(self) -> int:
        return sum(map(nbytes, self.groups.values()))

    @classmethod
    def of(cls: type[M], header: Mapping[str, Any], groups: Mapping[str, Tensors]) -> M:
        """The message that these are of; empty groups may have been left out on the way."""
        names = [entry.name for entry in fields(cls) if entry.name in GROUPS]
        return cls(**header, **{name: groups.get(name, {}) for name in names})


@dataclass(frozen=True)
class Broadcast(Message):
    """What the server sends at the start of a round.

    Attributes:
        round: from 0.
        rounds: in all: schedules such as "from the middle on" need it.
        weights: by their names in `state_dict()`.
        statistics: likewise; the counters are among them.
        extras: the method's own tensors (prototypes, control variates), named `part/name`.

    >>> message = Broadcast(0, 10, {"w": torch.ones(2)}, {})
    >>> broadcast_from_bytes(broadcast_to_bytes(message)).weights
    {'w': tensor([1., 1.])}
    """

    round: int
    rounds: int
    weights: Tensors
    statistics: Tensors
    extras: Tensors = field(default_factory=dict)

    def to(self, device: torch.device | str) -> Broadcast:
        """This one, on that device."""
        return Broadcast.of(self.header, {name: to_device(group, device) for name, group in self.groups.items()})


@dataclass(frozen=True)
class Update(Message):
    """What a client sends back after training.

    Attributes:
        client: its name.
        samples: how many it trained on, its weight in a mean.
        weights: by the names in the broadcast.
        statistics: likewise.
        extras: the method's own tensors.
        metrics: numbers of the client, such as its training loss.
        round: that it belongs to, from 0.

    >>> Update("clinic", 40, {"w": torch.ones(2)}, {}, metrics={"loss": 0.5}).nbytes
    8
    """

    client: str
    samples: int
    weights: Tensors
    statistics: Tensors
    extras: Tensors = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    round: int = 0


@dataclass(frozen=True)
class Answer(Message):
    """What a client sends back when a method asked it something inside a round: see `Server.ask`."""

    client: str
    samples: int
    tensors: Tensors


@dataclass(frozen=True)
class Missing:
    """A client whose update or answer did not come, or must not be used, and why."""

    client: str
    reason: str


def pack(header: Mapping[str, Any], **groups: Mapping[str, Tensor]) -> bytes:
    """Serialise groups of named tensors with a JSON header.

    Safetensors sorts by dtype and name. The order goes along, because sums over tensors depend on it: a client must
    compute the same bits whether its message came through memory, a pipe or a checkpoint.

    >>> unpack(pack({"round": 3}, weights={"w": torch.ones(2)}))
    ({'round': 3}, {'weights': {'w': tensor([1., 1.])}})
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
    """The inverse of `pack`, with an example there; raises `BadMessage` on anything that is not one."""
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
    return pack(message.header, **message.groups)


def broadcast_from_bytes(data: bytes) -> Broadcast:
    header, groups = unpack(data)
    with reading("its header cannot be read"):
        return Broadcast.of({name: int(header[name]) for name in ("round", "rounds")}, groups)


def update_to_bytes(message: Update) -> bytes:
    return pack(message.header, **message.groups)


def update_from_bytes(data: bytes) -> Update:
    header, groups = unpack(data)
    with reading("its header cannot be read"):
        known = {
            "client": str(header["client"]),
            "samples": whole_number(header["samples"], "number of samples"),
            "round": whole_number(header["round"], "round"),
            "metrics": {str(name): float(value) for name, value in dict(header["metrics"]).items()},
        }
        return Update.of(known, groups)


def is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def whole_number(value: object, what: str) -> int:
    if not is_whole(value):
        raise BadMessage(f"its {what} is not an integer but {shown(value)}")
    return value  # type: ignore[return-value]


def shown(value: object) -> str:
    """What was given, or how it begins."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}..."


def scoped_updates(updates: Sequence[Update], part: str) -> list[Update]:
    """The updates with only this part's extras."""
    return [replace(update, extras=select(update.extras, part)) for update in updates]


def mean_loss(updates: Sequence[Update]) -> float:
    """Over the samples of those that tell one."""
    known = [update for update in updates if "loss" in update.metrics]
    total = sum(update.samples for update in known)
    return sum(update.metrics["loss"] * update.samples for update in known) / total if known else float("nan")
