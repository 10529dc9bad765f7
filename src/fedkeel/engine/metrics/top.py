"""Whether the true class is among the k most probable ones."""

from torch import Tensor

from fedkeel.engine.metrics import METRICS, Metric
from fedkeel.options import Count


@METRICS.register("top")
def top(k: Count = 5) -> Metric:
    """Share of samples whose class is among the k that the model finds most probable."""

    def measure(logits: Tensor, labels: Tensor) -> Tensor:
        return (logits.topk(min(k, logits.shape[1]), dim=1).indices == labels[:, None]).any(1)

    return measure
