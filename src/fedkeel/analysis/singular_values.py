"""Singular values of the classifier (UniVarFL, Figure 1).

Of the weights of the final layer, (classes, d), largest first. On skewed data they decay fast: the classifier uses
few directions of the feature space. The paper shows them for a trained model; here for the global one at every
recorded round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import nn

from fedkeel.analysis.diagnostic import Diagnostic, Measured, Values, diagnostic
from fedkeel.analysis.figures import Figure, by_round, keyed, lines
from fedkeel.analysis.moment import Array, Moment
from fedkeel.config import from_one
from fedkeel.engine.local import Worker
from fedkeel.errors import FedkeelError


def singular_values(weights: Array) -> Array:
    """(C, d) -> the min(C, d) singular values, largest first."""
    return np.asarray(np.linalg.svd(np.asarray(weights, dtype=np.float64), compute_uv=False))


def effective_rank(values: Array) -> float:
    """exp of the entropy of the normalised singular values (Roy and Vetterli, 2007): all equal give their number."""
    shares = values[values > 0] / values.sum()
    return float(np.exp(-(shares * np.log(shares)).sum()))


def final_weights(model: nn.Module) -> nn.Parameter | None:
    """The last matrix of weights of the classifier's head."""
    matrices = [p for p in getattr(model, "head", nn.Identity()).parameters() if p.ndim == 2]
    return matrices[-1] if matrices else None


@diagnostic("singular-values")
class SingularValues(Diagnostic):
    """Singular values of the final layer's weights."""

    title = "Singular values of the classifier"
    what = (
        "Singular values of the final layer's weights, largest first. A steep fall means that the classifier has come "
        "to use few directions of the feature space, as it does on skewed data."
    )
    paper = "UniVarFL, Figure 1"

    def check(self, worker: Worker) -> None:
        if final_weights(worker.model) is None:
            raise FedkeelError(f"The head of this model has no matrix of weights, which '{self.name}' looks at.")

    def measure(self, moment: Moment) -> Values:
        moment.put_global(moment.clients[0])
        weights = final_weights(moment.worker.model)
        assert weights is not None
        return {"values": singular_values(weights.detach().double().cpu().numpy()).tolist()}

    def figures(self, measured: Sequence[Measured]) -> list[Figure]:
        series = {
            f"round {from_one(entry.round)}": (list(range(1, len(entry.values["values"]) + 1)), entry.values["values"])
            for entry in measured
        }
        figures = [lines("Of the final layer's weights", "index", "singular value", series, log_y=True)]
        if len(measured) > 1:
            ranks = {e.round: {"effective rank": effective_rank(np.asarray(e.values["values"]))} for e in measured}
            figures.append(by_round("Effective rank of the classifier", "rank", ranks))
        rank = effective_rank(np.asarray(measured[-1].values["values"]))
        return keyed(figures, "effective rank of the classifier", rank, "high")
