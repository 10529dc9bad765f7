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
        single_threaded: every client has one thread.
        elsewhere: clients run on devices of other processes; here is the CPU.
    """

    single_threaded: ClassVar[bool] = False
    elsewhere: ClassVar[bool] = False

    @classmethod
    def rank(cls, config: Config) -> int:  # noqa: ARG003
        """Of those that can run, `auto` takes the one with the highest; 0 is chosen by name alone."""
        return 0

    @classmethod
    def cannot_run(cls, config: Config, device: torch.device) -> str:  # noqa: ARG003
        """Why it cannot, with these options on this device, as the rest of "The executor 'name' ..."; else nothing."""
        return ""

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
    """The one that the configuration names, if it can run; with `auto`, the one with the highest rank that can."""
    if config.executor == "auto":
        able = [entry.name for entry in EXECUTORS if not executor_class(entry.name).cannot_run(config, device)]
        return max(able, key=lambda name: executor_class(name).rank(config))
    if problem := executor_class(config.executor).cannot_run(config, device):
        raise FedkeelError(f"The executor '{config.executor}' {problem}")
    return config.executor
