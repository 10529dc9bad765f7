"""Many clients at once on one GPU."""

from fedkeel.engine.executors.cuda import executor as executor
