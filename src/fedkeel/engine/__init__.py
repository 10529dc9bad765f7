"""The round loop, local training, evaluation, and the executors."""

from fedkeel.engine.executors.executor import EXECUTORS, Executor

__all__ = ["EXECUTORS", "Executor"]
