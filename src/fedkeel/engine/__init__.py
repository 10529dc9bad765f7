"""The round loop, local training, evaluation, and the executors."""

from __future__ import annotations

from fedkeel.engine import cuda, processes, serial
from fedkeel.engine.execution import EXECUTORS, ClientMemory, Executor

__all__ = ["EXECUTORS", "ClientMemory", "Executor", "cuda", "processes", "serial"]
