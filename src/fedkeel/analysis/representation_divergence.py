"""How differently the domains' features are distributed (GReg, Section 4.4, Figure 6).

Of each domain's test set the penultimate-layer outputs; every channel is taken as normal, N_i = N(m_i, s_i):

    D(N_i || N_j) = KL(N_i || N_j) + KL(N_j || N_i) = 1/2 (s_i + d) / s_j + 1/2 (s_j + d) / s_i - 1,   d = (m_i - m_j)^2

averaged over the channels. The paper does not say what becomes of a channel that does not vary in a domain, as happens
behind a ReLU: here `eps` is added to every variance, that of batch norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedkeel.analysis.diagnostic import Diagnostic, Measured, Values, diagnostic
from fedkeel.analysis.figures import Figure, by_round, keyed, matrix
from fedkeel.analysis.moment import Array, Moment
from fedkeel.config import from_one
from fedkeel.errors import FedkeelError


def divergence(features_i: Array, features_j: Array, eps: float = 1e-5) -> float:
    """Features (N, d) and (M, d) of two domains -> the symmetric divergence, averaged over the d channels."""
    variance_i, variance_j = features_i.var(axis=0) + eps, features_j.var(axis=0) + eps
    distance = (features_i.mean(axis=0) - features_j.mean(axis=0)) ** 2
    per_channel = 0.5 * (variance_i + distance) / variance_j + 0.5 * (variance_j + distance) / variance_i - 1
    return float(per_channel.mean())


@diagnostic("representation-divergence")
class RepresentationDivergence(Diagnostic):
    """Symmetric KL divergence of the features of each pair of domains."""

    title = "How differently the domains' features are distributed"
    what = (
        "The symmetric KL divergence between the features of two domains' test sets, every channel taken as normal, "
        "averaged over channels. Low: the representation does not tell the domains apart."
    )
    paper = "GReg, Section 4.4, Figure 6"

    def __init__(self, eps: float = 1e-5) -> None:
        """`eps`: added to every variance."""
        if not eps > 0:
            raise FedkeelError(f"The 'eps' of representation-divergence is {eps}: give a number above 0.")
        self.eps = eps

    def measure(self, moment: Moment) -> Values:
        features = {domain: outputs.features for domain, outputs in moment.test_features().items()}
        values = [[divergence(one, other, self.eps) for other in features.values()] for one in features.values()]
        return {"domains": list(features), "divergence": values}

    def figures(self, measured: Sequence[Measured]) -> list[Figure]:
        last = measured[-1]
        names = last.values["domains"]
        figures = [
            matrix(
                f"Divergence between domains, round {from_one(last.round)}",
                names,
                names,
                last.values["divergence"],
                "domain",
                "domain",
            )
        ]
        if len(measured) > 1 and len(names) > 1:
            means = {entry.round: {"mean over pairs": _mean_of_pairs(entry.values["divergence"])} for entry in measured}
            figures.append(by_round("Mean over the pairs of domains", "divergence", means))
        mean = _mean_of_pairs(last.values["divergence"]) if len(names) > 1 else None
        return keyed(figures, "divergence between domains", mean, "low")


def _mean_of_pairs(values: list[list[float]]) -> float:
    square = np.asarray(values, dtype=np.float64)
    return float(square[~np.eye(len(square), dtype=bool)].mean())
