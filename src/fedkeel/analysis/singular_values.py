"""Singular values of the classifier (UniVarFL, Figure 1).

Of the weights of the final layer, (classes, d), largest first. On skewed data they decay fast: the classifier uses
few directions of the feature space. The paper shows them for a trained model; here for the global one at every
recorded round.
"""

import torch
from torch import Tensor, nn

from fedkeel.analysis import Diagnostic, Measured, Snapshot, Values, diagnostic, over_rounds
from fedkeel.analysis.figures import Figure, keyed, lines
from fedkeel.engine.local import Worker
from fedkeel.errors import FedkeelError


def final_weights(model: nn.Module) -> list[Tensor]:
    """The last matrix of weights of the classifier's head, if it has one."""
    return [p for p in getattr(model, "head", nn.Identity()).parameters() if p.ndim == 2][-1:]


@diagnostic("singular-values")
class SingularValues(Diagnostic):
    """Singular values of the final layer's weights, largest first. A steep fall means that the classifier has come to
    use few directions of the feature space, as it does on skewed data."""

    title = "Singular values of the classifier"
    paper = "UniVarFL, Figure 1"

    def check(self, worker: Worker) -> None:
        if not final_weights(worker.model):
            raise FedkeelError(f"The head of this model has no matrix of weights, which '{self.name}' looks at.")

    def measure(self, snapshot: Snapshot) -> Values:
        snapshot.put_global(snapshot.clients[0])
        (weights,) = final_weights(snapshot.worker.model)
        return {"values": torch.linalg.svdvals(weights.detach().double().cpu()).tolist()}

    def figures(self, measured: list[Measured]) -> list[Figure]:
        def rank(values: Values) -> float:
            return effective_rank(torch.tensor(values["values"], dtype=torch.float64))

        found = {str(entry): entry.values["values"] for entry in measured}
        series = {name: (range(1, len(values) + 1), values) for name, values in found.items()}
        figures = [
            lines("Of the final layer's weights", "index", "singular value", series, log_y=True),
            *over_rounds("Effective rank of the classifier", "rank", measured, lambda v: {"effective rank": rank(v)}),
        ]
        return keyed(figures, "effective rank of the classifier", rank(measured[-1].values), "high")


def effective_rank(singular_values: Tensor) -> float:
    """exp of the entropy of the normalised singular values: all equal give their number.

    Reference: Roy and Vetterli, 2007; for the classifier of UniVarFL, Figure 1.

    >>> round(effective_rank(torch.tensor([2.0, 2.0, 2.0])), 4)
    3.0
    """
    shares = singular_values[singular_values > 0] / singular_values.sum()
    return float(torch.special.entr(shares).sum().exp())
