"""How sure the model is when it is wrong."""

from torch import Tensor

from fedkeel.engine.metrics import register_metric
from fedkeel.options import Share


@register_metric("sure-and-wrong", per_sample=True, lower=True)
def sure_and_wrong(logits: Tensor, labels: Tensor, *, above: Share = 0.9) -> Tensor:
    """Share of samples that are given a wrong class with a probability above a bound."""
    probability, found = logits.softmax(1).max(1)
    return (probability > above) & (found != labels)
