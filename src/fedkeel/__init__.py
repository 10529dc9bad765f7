"""Fedkeel: federated learning that stays upright when clients' data shift.

>>> import fedkeel
>>> fedkeel.Config().method  # `fedkeel.simulate(method="fedbn", rounds=20).domains` trains
'fedavg'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# What is asked for is imported then: `fedkeel --help` and `import fedkeel` do not wait for torch.
_HOMES = {
    "fedkeel.config": ("Config",),
    "fedkeel.core.method": ("Method", "Traits"),
    "fedkeel.engine.metrics": ("register_metric",),
    "fedkeel.errors": ("FedkeelError",),
    "fedkeel.experiments.advice": ("Advice", "advise"),
    "fedkeel.experiments.comparison": ("Comparison", "compare"),
    "fedkeel.experiments.tune": ("Tuning", "tune"),
    "fedkeel.methods": ("register",),
    "fedkeel.observer": ("Observer",),
    "fedkeel.runs.calibrated": ("calibrate",),
    "fedkeel.runs.run": ("Run", "load"),
    "fedkeel.simulation": ("resume", "simulate"),
}

if TYPE_CHECKING:
    from fedkeel import aggregation, analysis, data, engine, losses, messages, methods, models, nn, state
    from fedkeel.config import Config
    from fedkeel.core.method import Method, Traits
    from fedkeel.engine.metrics import register_metric
    from fedkeel.errors import FedkeelError
    from fedkeel.experiments.advice import Advice, advise
    from fedkeel.experiments.comparison import Comparison, compare
    from fedkeel.experiments.tune import Tuning, tune
    from fedkeel.methods import register
    from fedkeel.observer import Observer
    from fedkeel.runs.calibrated import calibrate
    from fedkeel.runs.run import Run, load
    from fedkeel.simulation import resume, simulate

__all__ = [
    "Advice", "Comparison", "Config", "FedkeelError", "Method", "Observer", "Run", "Traits", "Tuning", "advise",
    "aggregation", "analysis", "calibrate", "compare", "data", "engine", "load", "losses", "messages",
    "methods", "models", "nn", "register", "register_metric", "resume", "simulate", "state", "tune",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'fedkeel' has no attribute '{name}'")
    home = next((module for module, names in _HOMES.items() if name in names), "")
    value = getattr(importlib.import_module(home), name) if home else importlib.import_module(f"fedkeel.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
