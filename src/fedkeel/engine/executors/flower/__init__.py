"""Clients at other machines."""

from fedkeel.engine.executors.flower import executor as executor
