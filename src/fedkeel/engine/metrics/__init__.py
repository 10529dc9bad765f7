"""What is measured in a test beside accuracy and loss: `--metrics 'auc,top(k=3)'`. A file in this folder adds one.

A metric is of a whole test set: its function gets the probabilities (N, C) and the labels (N,) as NumPy arrays and
gives a number, or one for each class. Or it gives every sample a number: then it gets the logits (N, C) and the labels
(N,) as tensors and gives a tensor (N,).
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fedkeel import spec
from fedkeel.config import Config
from fedkeel.errors import FedkeelError
from fedkeel.registry import Registry, discover

F = TypeVar("F", bound=Callable[..., Any])
__all__ = ["METRICS", "Metric", "register_metric"]

RECORDED = ("accuracy", "loss")  # in every test, without being asked for


@dataclass(frozen=True)
class Metric:
    """A function of outputs and labels; `lower`: the lower the better. See `register_metric`, which makes it."""

    measure: Callable[..., Any]
    per_sample: bool = False
    lower: bool = False

    def __call__(self, outputs: Any, labels: Any) -> Any:
        return self.measure(outputs, labels)


METRICS: Registry[Metric] = Registry("metric")
"""The metrics by name."""


def register_metric(name: str, *, per_sample: bool = False, lower: bool = False, paper: str = "") -> Callable[[F], F]:
    """Decorator: make a function of outputs and labels a metric; its keyword-only parameters are options of it.

    Args:
        name: that `--metrics` and `select_by` know it by.
        per_sample: it gets logits (N, C) and labels (N,) as tensors and gives a number for each sample, (N,). Else it
            gets probabilities and labels of a whole test set as arrays, and gives a number or a `Measure`.
        lower: the lower, the better.
        paper: that it is from.

    >>> @register_metric("sure-example", per_sample=True)
    ... def sure(logits, labels, *, least: float = 0.9):
    ...     return logits.softmax(1).amax(1) >= least
    >>> METRICS.make("sure-example", least=0.5)(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
    tensor([True])
    """

    def remember(measure: F) -> F:
        @functools.wraps(measure)
        def build(**options: Any) -> Metric:
            return Metric(functools.partial(measure, **options), per_sample, lower)

        parameters = inspect.signature(measure).parameters.values()
        options = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
        build.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
        METRICS.register(name, paper=paper)(build)
        return measure

    return remember


def requested(text: str) -> dict[str, Metric]:
    """The metrics that the option `metrics` names, by their names as typed."""
    found: dict[str, Metric] = {}
    for part in spec.split(text, ",") if text.strip() else []:
        given = spec.parse(part)
        if str(given) in found:
            raise FedkeelError(f"'metrics' names '{given}' twice: keep one.")
        if given.name in RECORDED:
            raise FedkeelError(f"'metrics' names '{given}', which every test has: leave it out.")
        made: Any = METRICS.make(given.name, **given.options)
        found[str(given)] = made if isinstance(made, Metric) else Metric(made, per_sample=True)
    return found


def chosen(config: Config) -> dict[str, Metric]:
    """What the best round is chosen by, unless that is recorded anyway."""
    found = requested(config.select_by) if config.select_by not in RECORDED else {}
    if len(found) != 1 and config.select_by not in RECORDED:
        raise FedkeelError(f"'select_by' is '{config.select_by}': give accuracy, loss or one metric.")
    return found


def asked(config: Config) -> dict[str, Metric]:
    """What is measured in every test: what `metrics` names, and what the best round is chosen by."""
    return requested(config.metrics) | chosen(config)


def selection(config: Config) -> Callable[[Mapping[str, Any]], float]:
    """How good the scores of a round are by `select_by`: the higher the better, whatever is measured; where there is
    no number, worse than any. So is a round by loss or metric in which a site diverged: their means leave it out."""
    found = chosen(config)
    name = next(iter(found), config.select_by)
    lower = found[name].lower if found else name == "loss"

    def good(scores: Mapping[str, Any]) -> float:
        known = {"accuracy": scores["average"], "loss": scores["loss"]}
        value = known[name] if name in known else scores.get("metrics", {}).get(name, {}).get("average")
        if value is None or not math.isfinite(value) or (name != "accuracy" and scores.get("diverged")):
            return -math.inf
        return float(-value if lower else value)

    return good


discover(__name__)
