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

from dataclasses import dataclass

from torch import Tensor

from fedkeel.formulas.losses import classifier_variance, hyperspherical_energy
from fedkeel.methods import Batch, LocalClient, Method, Output, Traits, register
from fedkeel.options import NotNegative, Positive


@register("univarfl")
@dataclass
class UniVarFL(Method):
    """Keeps the predictions of a batch varied over the classes and its features spread over the sphere."""

    paper = "Gupta et al. 2025"
    traits = Traits(capturable=True)

    lambda_: NotNegative | None = None  # weight of the variance term; None: a quarter of the number of classes, D/4
    mu: NotNegative = 0.5  # weight of the energy
    eps: Positive = 1e-2  # of Eq. 3; the paper gives no value

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor:
        lambda_ = client.num_classes / 4 if self.lambda_ is None else self.lambda_
        variance = classifier_variance(output.logits.softmax(dim=1))
        return self.mu * hyperspherical_energy(output.features, self.eps) + lambda_ * variance
