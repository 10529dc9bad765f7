"""From what a model says of a whole test set to numbers: metrics of the set and, in detail, all that is told of it.

It is done where the test set is, so that over a network a site sends numbers and counts, and nothing of an image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import torch.nn.functional as F

from fedkeel.config import Config
from fedkeel.core.evaluation import Evaluation, Outputs, known_mean
from fedkeel.engine.metrics import METRICS, Metric, asked, requested
from fedkeel.errors import FedkeelError, first_line, nearest
from fedkeel.formulas.measures import Array, Measure, confusion, mean_of_samples, of_confusion
from fedkeel.options import described

_CROSS_ENTROPY = partial(F.cross_entropy, reduction="none")
ALWAYS = {**requested("auc, ece"), "loss": Metric(_CROSS_ENTROPY, per_sample=True, lower=True)}
OF_CONFUSION = tuple(of_confusion(np.ones((1, 1), int)))  # the names of what need not be asked for


def refuse_unmeasured(metric: str, config: Config) -> None:
    """Before a run, what a table of it is asked for and it would not have."""
    names = [*OF_CONFUSION, *ALWAYS, *asked(config)]
    if metric in names:
        return
    if metric in METRICS:
        raise FedkeelError(f"'{metric}' is not measured unless it is asked for: add --metrics {metric}.")
    raise FedkeelError(f"There is no '{metric}' to show: {nearest(metric, names)}")


def probabilities(outputs: Outputs) -> Array:
    return outputs.logits.double().softmax(1).numpy()


def completed(evaluation: Evaluation, metrics: Mapping[str, Metric], *, detailed: bool) -> Evaluation:
    """With the metrics of the whole set. Of a detailed one the outputs stay, for who keeps predictions."""
    outputs = evaluation.outputs
    if outputs is None:
        return evaluation
    chances, labels = probabilities(outputs), outputs.labels.numpy()
    found = {name: read(name, metric, chances, labels) for name, metric in metrics.items() if not metric.per_sample}
    values = {name: measure.value for name, measure in found.items()}
    if not detailed:
        return replace(evaluation, values=values, outputs=None)
    for name, metric in {**ALWAYS, **metrics}.items():
        if metric.per_sample:
            found[name] = mean_of_samples(metric(outputs.logits, outputs.labels).double().numpy())
        elif name not in found:
            found[name] = read(name, metric, chances, labels)
    counts = confusion(labels, outputs.logits.argmax(1).numpy(), chances.shape[1])
    cells = [[int(true), int(said), int(counts[true, said])] for true, said in np.argwhere(counts)]
    told = {name: measure.to_list() for name, measure in found.items() if name not in OF_CONFUSION}
    return replace(evaluation, values=values, details={"confusion": cells, "measures": told})


def read(name: str, metric: Metric, chances: Array, labels: Array) -> Measure:
    """What a metric of a whole test set gives: a measure, a number, or a number for each class."""
    try:
        given = metric(chances, labels)
    except FedkeelError:
        raise
    except Exception as error:
        raise FedkeelError(
            f"The metric '{name}' failed on {len(labels)} samples with a {type(error).__name__}: {first_line(error)}."
        ) from error
    if isinstance(given, Measure):
        return given
    try:
        numbers = np.asarray(given, dtype=float)
    except (TypeError, ValueError):
        numbers = np.empty(0)
    if numbers.shape not in ((), (chances.shape[1],)):
        raise FedkeelError(
            f"The metric '{name}' gives {described(given)}: let it give a number, or one for each of the "
            f"{chances.shape[1]} classes."
        )
    by_class = tuple(Measure(float(value), np.nan, np.nan) for value in numbers) if numbers.ndim else ()
    return Measure(known_mean(numbers.reshape(-1).tolist()), np.nan, np.nan, by_class)
