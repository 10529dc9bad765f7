"""Whether a model is as sure as it is right."""

from typing import Annotated

from fedkeel.engine.metrics import register_metric
from fedkeel.formulas.measures import Array, Measure, calibration_error
from fedkeel.options import Range

Bins = Annotated[int, Range(1, most=10_000)]


@register_metric("ece", lower=True, paper="Guo et al. 2017")
def ece(probabilities: Array, labels: Array, *, bins: Bins = 15) -> Measure:
    """Expected calibration error: how far the probability of the predicted class is from how often it is right."""
    return calibration_error(probabilities, labels, bins)
