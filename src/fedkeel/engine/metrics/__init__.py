"""What is measured in a test beside accuracy and loss: `--metrics 'brier,top(k=3)'`. A file in this folder adds one.

A metric gives every sample a number; over a test set its mean is shown. So it can be pooled over parts of a test set,
over clients and over sites exactly, and it is replayed on a GPU with the rest of an evaluation.
"""

from collections.abc import Callable

from torch import Tensor

from fedkeel import spec
from fedkeel.errors import FedkeelError
from fedkeel.registry import Registry, discover

Metric = Callable[[Tensor, Tensor], Tensor]  # logits (N, C) and labels (N,) -> (N,); asks the host nothing
METRICS: Registry[Metric] = Registry("metric")


def requested(text: str) -> dict[str, Metric]:
    """The metrics that the option `metrics` names, by their names as typed."""
    found: dict[str, Metric] = {}
    for part in spec.split(text, ",") if text.strip() else []:
        given = spec.parse(part)
        if str(given) in found:
            raise FedkeelError(f"'metrics' names '{given}' twice: keep one.")
        found[str(given)] = METRICS.make(given.name, **given.options)
    return found


discover(__name__)
