"""Fedkeel: federated learning that stays upright when clients' data shift.

>>> import fedkeel
>>> fedkeel.Config().method  # `fedkeel.simulate(method="fedbn", rounds=20).domains` trains
'fedavg'
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from types import ModuleType
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
    "fedkeel.simulation": ("extend", "resume", "simulate"),
}
# Modules that users import from here, wherever they lie.
_ALIASES = {
    "fedkeel.losses": "fedkeel.formulas.losses",
    "fedkeel.aggregation": "fedkeel.formulas.aggregation",
    "fedkeel.state": "fedkeel.core.state",
    "fedkeel.messages": "fedkeel.core.messages",
}

if TYPE_CHECKING:
    from fedkeel import analysis, data, engine, methods, models, nn
    from fedkeel.config import Config
    from fedkeel.core import messages, state
    from fedkeel.core.method import Method, Traits
    from fedkeel.engine.metrics import register_metric
    from fedkeel.errors import FedkeelError
    from fedkeel.experiments.advice import Advice, advise
    from fedkeel.experiments.comparison import Comparison, compare
    from fedkeel.experiments.tune import Tuning, tune
    from fedkeel.formulas import aggregation, losses
    from fedkeel.methods import register
    from fedkeel.observer import Observer
    from fedkeel.runs.calibrated import calibrate
    from fedkeel.runs.run import Run, load
    from fedkeel.simulation import extend, resume, simulate

__all__ = [
    "Advice", "Comparison", "Config", "FedkeelError", "Method", "Observer", "Run", "Traits", "Tuning", "advise",
    "aggregation", "analysis", "calibrate", "compare", "data", "engine", "extend", "load", "losses", "messages",
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


class _Aliases:
    """`from fedkeel.losses import consistency_kl` is the module of `fedkeel.formulas`, not a second one."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        loader: Any = self  # not of importlib.abc's kind, which takes longer to import than all of `--help`
        return importlib.machinery.ModuleSpec(name, loader) if name in _ALIASES else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(_ALIASES[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It is executed already; the import system has put the alias's own specification into it."""
        if module.__spec__ is not None:
            module.__spec__ = module.__spec__.loader_state


sys.meta_path.append(_Aliases())
