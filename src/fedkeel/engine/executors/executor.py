"""What an executor is: the only thing that differs between a laptop and a network. And the registry that finds it.

A file in this folder that registers a class derived from `Executor` adds one; what the class says of itself is all that
the rest of the package knows of it.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch

from fedkeel.config import Config
from fedkeel.core.evaluation import Evaluation
from fedkeel.core.messages import Answer, Broadcast, Missing, Update
from fedkeel.core.state import Tensors
from fedkeel.engine.memory import ClientMemory
from fedkeel.errors import FedkeelError
from fedkeel.registry import Registry


class Attendance:
    """Which clients train at this moment, and how long each of a round took. Those that run side by side on a GPU have
    no seconds of their own."""

    def __init__(self) -> None:
        self._began: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self.tell: Callable[[Sequence[str]], None] = lambda _: None  # who trains now

    def begin(self, *clients: str) -> None:
        self._began |= dict.fromkeys(clients, time.perf_counter())
        self.tell([*self._began])

    def end(self, client: str) -> None:
        if (began := self._began.pop(client, None)) is not None:  # else it did something other than train
            self._seconds[client] = round(time.perf_counter() - began, 4)
            self.tell([*self._began])

    def take(self) -> dict[str, float]:
        """The seconds of the clients that ended since the last time."""
        seconds, self._began, self._seconds = self._seconds, {}, {}
        return seconds


Part = tuple[str, slice | None]
"""A client, and which of each split's samples; None: all."""


class Executor(ABC):
    """Runs clients somewhere. Results come in the order of `clients`, whatever order they finished in.

    The engine makes it by the option `executor`. No example: see "Add an executor in one file" in Contributing.

    Attributes:
        rank: of those that suit a run, `auto` takes the one with the highest; 0 is chosen by name alone.
        captures_steps: local steps are replayed as CUDA graphs, so gradients of single samples cannot be had.
        single_threaded: every client has one thread; a run whose steps use several goes to another executor.
        seconds_of: what the seconds on clients in a profile are, for a person.
        elsewhere: clients run on devices of other processes; here is the CPU.
        sums: groups of an update ("weights", "statistics") that it may add up where they are made: what it yields then
            are `Summed`, and `mean` has what they come to. The round loop sets it where nobody looks at them.
    """

    rank: ClassVar[int] = 0
    captures_steps: ClassVar[bool] = False
    single_threaded: ClassVar[bool] = False
    seconds_of: ClassVar[str] = "Seconds of this process, one client after another."
    elsewhere: ClassVar[bool] = False
    memory_class: ClassVar[type[ClientMemory]] = ClientMemory
    sums: Sequence[str] = ()
    memory: ClientMemory

    @cached_property
    def attendance(self) -> Attendance:
        """Who trains at this moment, as far as the executor says."""
        return Attendance()

    @classmethod
    def cannot_run(cls, device: torch.device) -> str:  # noqa: ARG003
        """Why it cannot run on this device and system, as the rest of "The executor 'name' ..."; nothing if it can."""
        return ""

    @classmethod
    def suits(cls, config: Config) -> bool:  # noqa: ARG003
        """Whether `auto` may take it for these options."""
        return True

    @classmethod
    def worker_processes(cls, config: Config) -> int:  # noqa: ARG003
        """How many processes work at the same time."""
        return 1

    @abstractmethod
    def train(self, clients: Sequence[str], broadcast: Broadcast) -> Iterator[Update | Missing]:
        """Every client trains from the broadcast: its update, or why there is none."""
        ...

    @abstractmethod
    def evaluate(
        self, clients: Sequence[str], broadcast: Broadcast, splits: Sequence[str], *, detailed: bool = False
    ) -> Iterator[list[Evaluation]]:
        """`detailed`: with outputs or, where test sets are elsewhere, with what is told of them."""
        ...

    @abstractmethod
    def ask(self, clients: Sequence[str], broadcast: Broadcast, question: str) -> Iterator[Answer | Missing]:
        """What a method's `answer` gives on every client, or why there is none."""
        ...

    def evaluate_parts(
        self, parts: Sequence[Part], broadcast: Broadcast, splits: Sequence[str], *, detailed: bool = False
    ) -> Iterator[list[Evaluation]]:
        """As `evaluate`, of parts of test sets; for executors that another one runs."""
        raise NotImplementedError

    def mean(self) -> Tensors:
        """Of the updates of the last training that are `Summed`, by their weights."""
        return {}

    @property
    def is_trying(self) -> bool:
        """Whether it still tries out in its rounds what is fastest; those are not to be timed."""
        return False

    def about(self) -> dict[str, Any]:
        """What a profile tells of it."""
        return {}

    def close(self) -> None:  # noqa: B027
        """The run is over."""


EXECUTORS: Registry[Executor] = Registry("executor")
"""The executors by name."""


def executor_class(name: str) -> type[Executor]:
    found = EXECUTORS.entry(name).build
    assert isinstance(found, type)
    return found


def names_single_threaded(config: Config) -> bool:
    """Whether the configuration names an executor whose clients have one thread each."""
    return config.executor != "auto" and executor_class(config.executor).single_threaded


def runs_elsewhere(config: Config) -> bool:
    """Whether the configuration names an executor whose clients have devices of other processes."""
    return config.executor != "auto" and executor_class(config.executor).elsewhere


def choose_executor(config: Config, device: torch.device) -> str:
    """The one that the configuration names, if it can run here; with `auto`, the best of those that suit it."""
    if config.executor != "auto":
        named = executor_class(config.executor)
        if problem := named.cannot_run(device):
            raise FedkeelError(f"The executor '{config.executor}' {problem}")
        if config.threads <= 1 or not names_single_threaded(config):
            return config.executor
    classes = {entry.name: executor_class(entry.name) for entry in EXECUTORS}
    fitting = [name for name, known in classes.items() if known.suits(config) and not known.cannot_run(device)]
    return max(fitting, key=lambda name: classes[name].rank)
