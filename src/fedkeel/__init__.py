"""Fedkeel: federated learning that stays upright when clients' data shift.

>>> import fedkeel                                              # doctest: +SKIP
>>> run = fedkeel.simulate(method="fedbn", rounds=20)           # doctest: +SKIP
>>> run.domains                                                 # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# What is asked for is imported then: `fedkeel --help` and `import fedkeel` do not wait for torch.
_HOMES = {
    "simulate": "fedkeel.run",
    "resume": "fedkeel.run",
    "Run": "fedkeel.run",
    "compare": "fedkeel.comparison",
    "Config": "fedkeel.config",
    "Method": "fedkeel.method",
    "register": "fedkeel.methods",
    "Observer": "fedkeel.observer",
    "FedkeelError": "fedkeel.errors",
}
_MODULES = ("analysis", "data", "models", "methods", "losses", "aggregation", "nn", "state", "messages", "engine")

if TYPE_CHECKING:
    from fedkeel import aggregation, analysis, data, engine, losses, messages, methods, models, nn, state
    from fedkeel.comparison import compare
    from fedkeel.config import Config
    from fedkeel.errors import FedkeelError
    from fedkeel.method import Method
    from fedkeel.methods import register
    from fedkeel.observer import Observer
    from fedkeel.run import Run, resume, simulate

__all__ = [
    "Config",
    "FedkeelError",
    "Method",
    "Observer",
    "Run",
    "aggregation",
    "analysis",
    "compare",
    "data",
    "engine",
    "losses",
    "messages",
    "methods",
    "models",
    "nn",
    "register",
    "resume",
    "simulate",
    "state",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(f"fedkeel.{name}")
    else:
        raise AttributeError(f"module 'fedkeel' has no attribute '{name}'")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
