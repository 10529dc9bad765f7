"""What travels between the round loop and an executor: tasks one way, results the other."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

import torch

from fedkeel.core.state import Tensors
from fedkeel.errors import TrainingError

Remembered = Tensors | Callable[[], Tensors]
"""What a client remembers: its tensors, or a handle that fetches them from where they lie."""


@dataclass(frozen=True)
class Task:
    """What one client is to do with a broadcast, and what it remembers of its earlier rounds.

    Attributes:
        do: train; answer a method's `question`; evaluate `splits`, or of them the samples of `part`.
        detailed: an evaluation with all outputs.
    """

    do: Literal["train", "answer", "evaluate"]
    client: str
    memory: Remembered = field(default_factory=dict)
    question: str = ""
    splits: Sequence[str] = ()
    part: slice | None = None
    detailed: bool = False


Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Result(Generic[Outcome]):
    """What came of a task: an `Update`, an `Answer`, or a list of `Evaluation`.

    `memory` is what the client remembers from now on, if the run accepts this; `seconds` are those of its training,
    where it had the machine to itself.
    """

    client: str
    outcome: Outcome
    memory: Remembered = field(default_factory=dict)
    seconds: float | None = None


class LostMemory(TrainingError):
    """What a client remembered is gone with where it lay: the run goes on from its last checkpoint."""


def fetched(memory: Remembered) -> Tensors:
    return memory() if callable(memory) else memory


def fingerprint(memory: Tensors) -> bytes:
    """The same for the same names, shapes, kinds and bits."""
    whole = hashlib.blake2b(digest_size=32)
    for name, tensor in memory.items():
        whole.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        whole.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return whole.digest()
