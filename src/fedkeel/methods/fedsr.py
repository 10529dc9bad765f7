"""FedSR: Nguyen, Torr and Lim, "FedSR: A Simple and Effective Domain Generalization Method for Federated Learning",
NeurIPS 2022.

A simple representation has less room for what only one domain has. The features become a distribution, of which the
classifier sees a sample, and two terms keep it simple: short samples, and little information about the image beyond its
label (an upper bound of I(x; z | y), with a learnable reference distribution for each class).

    (mu, s) = linear(features),  sigma = softplus(s),  z ~ N(mu, sigma^2),  logits = linear(z)
    L = CE + lambda_l2r mean ||z||_2 + lambda_cmi mean KL(N(C mu, (C sigma)^2) || N(r_y, softplus(s_y)^2))

r, s and C are learnable and are not averaged: each client keeps its own, as the authors' code does. In testing the
probabilities of `samples` draws are averaged, always the same draws for every image, so that a prediction does not
depend on chance or on what else is in the batch. In training the noise is that of (seed, client, round, step).
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel import seeds
from fedkeel.core.types import Classifier
from fedkeel.methods import Batch, LocalClient, Method, Output, Traits, register
from fedkeel.nn.draws import Draws, normal
from fedkeel.nn.surgery import replace_modules
from fedkeel.options import Count, NotNegative

_LEAST = 1e-6
"""A standard deviation is at least this: softplus reaches 0 in single precision, and its logarithm enters the loss."""


@register("fedsr")
@dataclass
class FedSR(Method):
    """Features become a distribution, kept short and free of what the label does not need."""

    paper = "Nguyen et al. 2022"
    # Not personal: r, s and C are of the loss alone.
    traits = Traits(needs_memory=True, personal=False, capturable=True, replaces={"head"})

    lambda_l2r: NotNegative = 0.01  # weight of the length
    lambda_cmi: NotNegative = 0.001  # weight of the divergence
    z_dim: Count = 512  # dimensions of z
    samples: Count = 20  # draws averaged in testing

    def prepare(self, model: Classifier) -> None:
        head, place = model.head, next(model.parameters()).device
        stochastic = StochasticHead(model.feature_dim, self.z_dim, model.num_classes, self.samples).to(place)
        names = replace_modules(model, lambda _, module: module is head, lambda *_: stochastic)
        self.kept = {f"{name}.{entry}" for name in names for entry in ("r_mean", "r_spread", "scale")}

    def start(self, client: LocalClient) -> None:
        head = client.scratch["head"] = client.model.get_submodule("head")
        assert isinstance(head, StochasticHead)
        head.begin(client.generator("fedsr"))

    def inputs(self, client: LocalClient, x: Tensor) -> Tensor:
        client.scratch["head"].counter.add_(1)
        return x

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor:
        head: StochasticHead = client.scratch["head"]
        mean, deviation = head.distribution(output.features)
        length: Tensor = torch.linalg.vector_norm(head.sample(mean, deviation), dim=1).mean()
        return self.lambda_l2r * length + self.lambda_cmi * head.divergence(mean, deviation, batch.y)


class StochasticHead(Draws):
    """Features (N, d) -> a normal distribution over z -> logits of a sample, or in evaluation of several."""

    draws: Tensor

    def __init__(self, feature_dim: int, z_dim: int, num_classes: int, samples: int) -> None:
        super().__init__()
        self.moments = nn.Linear(feature_dim, 2 * z_dim)
        self.classifier = nn.Linear(z_dim, num_classes)
        self.r_mean = nn.Parameter(torch.zeros(num_classes, z_dim))
        self.r_spread = nn.Parameter(torch.ones(num_classes, z_dim))
        self.scale = nn.Parameter(torch.ones(()))
        draws = torch.randn(samples, 1, z_dim, generator=seeds.generator(0, "fedsr", samples, z_dim))
        self.register_buffer("draws", draws, persistent=False)

    def distribution(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """mu and sigma, (N, z_dim) each."""
        both: Tensor = self.moments(features.flatten(1))
        mean, spread = both.to(torch.promote_types(both.dtype, torch.float32)).chunk(2, dim=1)
        return mean, F.softplus(spread).clamp_min(_LEAST)

    def sample(self, mean: Tensor, deviation: Tensor) -> Tensor:
        """z of this step: the same for the same step, however often it is asked for."""
        return mean + deviation * normal(self.key, self.counter, tuple(mean.shape)).to(mean.dtype)

    def forward(self, features: Tensor) -> Tensor:
        mean, deviation = self.distribution(features)
        if self.training:
            logits: Tensor = self.classifier(self.sample(mean, deviation))
            return logits
        each: Tensor = self.classifier(mean + deviation * self.draws)  # (samples, N, classes)
        return each.log_softmax(dim=-1).logsumexp(dim=0) - math.log(len(self.draws))

    def divergence(self, mean: Tensor, deviation: Tensor, labels: Tensor) -> Tensor:
        """KL(N(C mu, (C sigma)^2) || N(r_y, softplus(s_y)^2)), the mean over the batch."""
        mean, deviation = self.scale * mean, (self.scale.abs() * deviation).clamp_min(_LEAST)
        r_mean, r_deviation = self.r_mean[labels], F.softplus(self.r_spread).clamp_min(_LEAST)[labels]
        squares = deviation.square() + (mean - r_mean).square()
        each = r_deviation.log() - deviation.log() + squares / (2 * r_deviation.square()) - 0.5
        return each.sum(dim=1).mean()
