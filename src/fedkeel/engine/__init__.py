"""The round loop, local training, evaluation, and the executors."""

from __future__ import annotations

from fedkeel.engine.executors import flower, processes, serial
from fedkeel.engine.executors.cuda import executor as cuda
from fedkeel.engine.executors.executor import EXECUTORS, ClientMemory, Executor

__all__ = ["EXECUTORS", "ClientMemory", "Executor", "cuda", "flower", "processes", "serial"]
