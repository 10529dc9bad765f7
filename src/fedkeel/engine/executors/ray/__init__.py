"""Clients on the GPUs and cores of a Ray cluster."""

from fedkeel.engine.executors.ray import executor as executor
