"""Clients at other machines."""

from fedkeel.engine.executors.sites import executor as executor
