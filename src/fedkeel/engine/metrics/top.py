"""Whether the true class is among the k most probable ones."""

from torch import Tensor

from fedkeel.engine.metrics import register_metric
from fedkeel.options import Count


@register_metric("top", per_sample=True)
def top(logits: Tensor, labels: Tensor, *, k: Count = 5) -> Tensor:
    """Share of samples whose class is among the `k` that the model finds most probable."""
    return (logits.topk(min(k, logits.shape[1]), dim=1).indices == labels[:, None]).any(1)
