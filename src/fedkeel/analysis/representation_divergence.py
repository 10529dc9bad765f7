"""How differently the domains' features are distributed (GReg, Section 4.4, Figure 6).

`feature_divergence` of the penultimate-layer outputs on each pair of domains' test sets. The paper
does not say what becomes of a channel that does not vary in a domain, as happens behind a ReLU: here `eps` is added to
every variance, that of batch norm.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedkeel.analysis import Diagnostic, Measured, Snapshot, Values, diagnostic, over_rounds
from fedkeel.analysis.figures import Figure, keyed, matrix
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


def feature_divergence(features_i: Tensor, features_j: Tensor, eps: float = 1e-5) -> Tensor:
    """Symmetric KL divergence of two sets of features, every channel taken as normal, averaged over channels.

        KL(N_i || N_j) + KL(N_j || N_i) = 1/2 (s_i + d) / s_j + 1/2 (s_j + d) / s_i - 1,    d = (m_i - m_j)^2

    Args:
        features_i, features_j: (N, d) and (M, d).
        eps: added to every variance s, since behind a ReLU a channel may not vary at all.

    Reference: GReg, Sec. 4.4.

    >>> feature_divergence(torch.tensor([[0.0], [2.0]]), torch.tensor([[2.0], [4.0]]), eps=0)  # d = 4, variances 1
    tensor(4.)
    """
    variance_i, variance_j = (f.var(dim=0, correction=0) + eps for f in (features_i, features_j))
    distance = (features_i.mean(dim=0) - features_j.mean(dim=0)).square()
    return ((variance_i + distance) / variance_j / 2 + (variance_j + distance) / variance_i / 2 - 1).mean()
