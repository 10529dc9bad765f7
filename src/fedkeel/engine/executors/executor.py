"""What an executor is: the only thing that differs between a laptop and a network. And the registry that finds it.

A file in this folder that registers a class derived from `Executor` adds one; what the class says of itself is all that
the rest of the package knows of it.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from fedkeel.config import Config
from fedkeel.core.messages import Broadcast, Missing
from fedkeel.engine.tasks import Result, Task
from fedkeel.errors import FedkeelError
from fedkeel.registry import Registry


class Executor(ABC):
    """Runs clients somewhere.

    The engine makes it by the option `executor`. No example: see "Add an executor in one file" in Contributing.

    Attributes:
        rank: of those that suit a run, `auto` takes the one with the highest; 0 is chosen by name alone.
        captures_steps: local steps are replayed as CUDA graphs, so gradients of single samples cannot be had.
        single_threaded: every client has one thread; a run whose steps use several goes to another executor.
        elsewhere: clients run on devices of other processes; here is the CPU.
    """

    rank: ClassVar[int] = 0
    captures_steps: ClassVar[bool] = False
    single_threaded: ClassVar[bool] = False
    elsewhere: ClassVar[bool] = False

    @classmethod
    def cannot_run(cls, device: torch.device) -> str:  # noqa: ARG003
        """Why it cannot run on this device and system, as the rest of "The executor 'name' ..."; nothing if it can."""
        return ""

    @classmethod
    def suits(cls, config: Config) -> bool:  # noqa: ARG003
        """Whether `auto` may take it for these options."""
        return True

    @abstractmethod
    def map(self, tasks: Sequence[Task], broadcast: Broadcast) -> Iterator[Result[Any] | Missing]:
        """Every task's result, or why there is none, in whatever order they finish."""
        ...

    def close(self) -> None:  # noqa: B027
        """The run is over."""


EXECUTORS: Registry[Executor] = Registry("executor", given=("worker",))
"""The executors by name: classes made of a `Worker`, whose `config` has their options."""


def available_cores() -> int:
    """Those that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
