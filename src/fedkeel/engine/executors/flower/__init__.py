"""Clients as sites at other machines, whatever carries the messages: `fedkeel.deploy` is the network."""

from __future__ import annotations

from fedkeel.engine.executors.flower.executor import FlowerExecutor

__all__ = ["FlowerExecutor"]
