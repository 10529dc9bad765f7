"""What follows from the confusion matrix: means over the classes that a test set has, each class counting the same."""

from collections.abc import Callable
from functools import partial

from fedkeel.engine.metrics import METRICS, Metric
from fedkeel.formulas.measures import Array, Measure, confusion, of_confusion

SUMMARIES = {
    "balanced-accuracy": "Mean over classes of the share of a class's images that are recognised.",
    "recall": "Share of a class's images that are recognised; the mean over classes is the balanced accuracy.",
    "precision": "Share of the images taken for a class that are of it, mean over classes.",
    "f1": "Harmonic mean of precision and recall, mean over classes.",
}


def _read(name: str, probabilities: Array, labels: Array) -> Measure:
    return of_confusion(confusion(labels, probabilities.argmax(1), probabilities.shape[1]))[name]


def _builder(name: str) -> Callable[[], Metric]:
    return lambda: Metric(partial(_read, name))


for name, summary in SUMMARIES.items():
    METRICS.register(name, summary=summary)(_builder(name))
