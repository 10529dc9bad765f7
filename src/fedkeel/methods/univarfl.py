"""UniVarFL: Gupta et al., "UniVarFL: Uniformity and Variance Regularized Federated Learning for Heterogeneous Data",
arXiv:2506.08167, Eqs. 1-4 and Algorithm 1.

On a client with few classes the classifier leans towards them and the features crowd together. Two terms keep both as
on balanced data, without anything from the server: the predictions f(x) of a batch shall vary over each of the D
classes as much as perfect ones do, and the features z shall spread over the sphere.

    L   = CE + mu L_HE + lambda L_V                                                     (Eq. 4)
    L_V = 1/D sum_j max(0, c - Var_i f(x_i)_j),    c: the same of the identity matrix   (Eqs. 1-2)
    L_HE = 1/n^2 sum_ij 1 / (1 - z_i . z_j + eps)                                       (Eq. 3)

The paper's networks have a projector before the head, whose output the features then are: `resnet18(projector=512)`.
"""

from __future__ import annotations

from torch import Tensor

from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.method import Method, Traits
from fedkeel.core.types import Output
from fedkeel.errors import FedkeelError
from fedkeel.formulas.losses import classifier_variance, hyperspherical_energy
from fedkeel.methods import register


@register("univarfl")
class UniVarFL(Method):
    """Keeps the predictions of a batch varied over the classes and its features spread over the sphere."""

    paper = "Gupta et al. 2025"
    traits = Traits(capturable=True)

    def __init__(self, lambda_: float | None = None, mu: float = 0.5, eps: float = 1e-2) -> None:
        """`lambda_`: weight of the variance term, None for a quarter of the number of classes (D/4).
        `mu`: weight of the energy. `eps`: of Eq. 3, which the paper gives no value for.
        """
        for option, weight in (("lambda_", lambda_), ("mu", mu)):
            if weight is not None and weight < 0:
                raise FedkeelError(f"The '{option}' of univarfl is {weight}: give at least 0.")
        if eps <= 0:
            raise FedkeelError(f"The 'eps' of univarfl is {eps}: give a number above 0.")
        self.lambda_, self.mu, self.eps = lambda_, mu, eps

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor:
        lambda_ = client.num_classes / 4 if self.lambda_ is None else self.lambda_
        variance = classifier_variance(output.logits.softmax(dim=1))
        return self.mu * hyperspherical_energy(output.features, self.eps) + lambda_ * variance
