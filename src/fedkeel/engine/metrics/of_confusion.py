"""What follows from the confusion matrix: means over the classes that a test set has, each class counting the same."""

from fedkeel.engine.metrics import register_metric
from fedkeel.formulas.measures import Array, Measure, confusion, of_confusion


def _all(probabilities: Array, labels: Array) -> dict[str, Measure]:
    return of_confusion(confusion(labels, probabilities.argmax(1), probabilities.shape[1]))


@register_metric("balanced-accuracy")
def balanced_accuracy(probabilities: Array, labels: Array) -> Measure:
    """Mean over classes of the share of a class's images that are recognised."""
    return _all(probabilities, labels)["balanced-accuracy"]


@register_metric("recall")
def recall(probabilities: Array, labels: Array) -> Measure:
    """Share of a class's images that are recognised; the mean over classes is the balanced accuracy."""
    return _all(probabilities, labels)["recall"]


@register_metric("precision")
def precision(probabilities: Array, labels: Array) -> Measure:
    """Share of the images taken for a class that are of it, mean over classes."""
    return _all(probabilities, labels)["precision"]


@register_metric("f1")
def f1(probabilities: Array, labels: Array) -> Measure:
    """Harmonic mean of precision and recall, mean over classes."""
    return _all(probabilities, labels)["f1"]
