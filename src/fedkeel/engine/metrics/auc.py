"""Area under the ROC curve."""

from fedkeel.engine.metrics import register_metric
from fedkeel.formulas import measures
from fedkeel.formulas.measures import Array, Measure


@register_metric("auc", paper="Hanley and McNeil 1982")
def auc(probabilities: Array, labels: Array) -> Measure:
    """Area under the ROC curve, each class against the rest, and the mean over the classes that a test set has."""
    return measures.auc(probabilities, labels)
