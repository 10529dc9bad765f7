"""How differently the domains' features are distributed (GReg, Section 4.4, Figure 6).

`formulas.diagnostics.feature_divergence` of the penultimate-layer outputs on each pair of domains' test sets. The paper
does not say what becomes of a channel that does not vary in a domain, as happens behind a ReLU: here `eps` is added to
every variance, that of batch norm.
"""

from dataclasses import dataclass

import numpy as np

from fedkeel.analysis import Diagnostic, Measured, Snapshot, Values, diagnostic, over_rounds
from fedkeel.analysis.figures import Figure, keyed, matrix
from fedkeel.formulas.diagnostics import feature_divergence
from fedkeel.options import Positive


@diagnostic("representation-divergence")
@dataclass
class RepresentationDivergence(Diagnostic):
    """The symmetric KL divergence between the features of two domains' test sets, every channel taken as normal,
    averaged over channels. Low: the representation does not tell the domains apart."""

    title = "How differently the domains' features are distributed"
    paper = "GReg, Section 4.4, Figure 6"

    eps: Positive = 1e-5  # added to every variance

    def measure(self, snapshot: Snapshot) -> Values:
        features = {domain: outputs.features for domain, outputs in snapshot.test_features().items()}
        every = features.values()
        values = [[float(feature_divergence(one, other, self.eps)) for other in every] for one in every]
        return {"domains": list(features), "divergence": values}

    def figures(self, measured: list[Measured]) -> list[Figure]:
        values = measured[-1].values
        names, square = values["domains"], values["divergence"]
        figures = [matrix(f"Divergence between domains, {measured[-1]}", names, names, square, "domain", "domain")]
        if len(names) < 2:
            return figures
        title = "Mean over the pairs of domains"
        figures += over_rounds(title, "divergence", measured, lambda v: {"mean over pairs": _of_pairs(v["divergence"])})
        return keyed(figures, "divergence between domains", _of_pairs(square), "low")


def _of_pairs(values: list[list[float]]) -> float:
    square = np.asarray(values, dtype=np.float64)
    return float(square[~np.eye(len(square), dtype=bool)].mean())
