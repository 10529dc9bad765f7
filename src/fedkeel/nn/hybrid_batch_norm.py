"""Hybrid Batch Normalisation (Chen et al., "Hybrid Batch Normalisation", ICML 2025).

A batch of a client says little about the federation, and global statistics say little about this step: HBN mixes both,
in a proportion that every client learns for every channel (Eq. 9).
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.core.state import BatchNorm, moment_names
from fedkeel.errors import FedkeelError, nearest
from fedkeel.nn.kernels import norms
from fedkeel.nn.mixed_batch_norm import mixed
from fedkeel.nn.surgery import replace_batch_norms

SHARES = {"learned": None, "fixed": 0.5, "global": 1.0, "batch": 0.0}  # of the global statistics, in the ablations


class HybridBatchNorm(nn.Module):
    """HBN for inputs (N, C, ...): Eqs. 1, 9 and 10.

        y = gamma (x - m) / sqrt(v + eps) + beta,    m = a mu_g + (1 - a) mu_b,    v = a sigma_g^2 + (1 - a) sigma_b^2

    with mu_g, sigma_g^2 of the federation, mu_b, sigma_b^2 of the batch, and a = sigmoid(alpha).

    Learnable: `weight`, `bias` (gamma, beta) and `alpha`, one per channel, initially 0; sigmoid(alpha) is the share of
    the *global* statistics in the mixture. Buffers: `running_mean`, `running_var`, the global statistics, set by the
    server and never by a forward. In evaluation the global statistics alone are used, or, inside
    `fedkeel.nn.batch_statistics`, those of the batch alone.

    Args:
        num_features: C.
        eps: added to the variance.
        affine: whether there are `weight` and `bias`.
        mix: HBN's ablations (Table 6): "fixed" is 1:1, "global" and "batch" use one of the two.

    >>> layer = HybridBatchNorm2d(1, eps=0)
    >>> layer(torch.tensor([6.0, 8.0]).view(2, 1, 1, 1)).flatten().tolist()  # m = 7 / 2, v = (1 + 1) / 2
    [2.5, 4.5]
    """

    running_mean: Tensor
    running_var: Tensor
    _count: Tensor
    _mean: Tensor
    _var: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5, affine: bool = True, mix: str = "learned") -> None:
        super().__init__()
        if mix not in SHARES:
            raise FedkeelError(f"HybridBatchNorm has no mix '{mix}': {nearest(str(mix), SHARES)}")
        self.num_features, self.eps, self.affine = num_features, eps, affine
        self.mix, self.constant = mix, SHARES[mix]
        self.weight = nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if affine else None
        self.alpha = nn.Parameter(torch.zeros(num_features), requires_grad=mix == "learned")
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))
        self.tested_by_batch = False
        self.record: str | None = None
        self.recording_momentum: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        statistics = (self.running_mean, self.running_var)
        if not self.training:
            mean, var = (None, None) if self.tested_by_batch else statistics
            return F.batch_norm(x, mean, var, self.weight, self.bias, self.tested_by_batch, 0.0, self.eps)
        if norms.takes("hybrid", x, self.alpha, self.weight, self.bias, *statistics):
            return norms.hybrid(x, self)
        share = self.share()
        y, mean, var = mixed(x, share, statistics, self.weight, self.bias, self.eps)
        if self.record is not None:
            with torch.no_grad():
                if self.record == "mixture":
                    mean, var = torch.lerp(mean, self.running_mean, share), torch.lerp(var, self.running_var, share)
                self._remember(mean, var, x.shape[0])
        return y

    def share(self) -> Tensor:
        """The share of the global statistics per channel: sigmoid(alpha), or the constant of an ablation."""
        return torch.sigmoid(self.alpha) if self.constant is None else torch.full_like(self.alpha, self.constant)

    def start_recording(self, what: str = "mixture", momentum: float | None = None) -> None:
        """From now on, and from nothing, pool over batches the moments that training forwards see (Eq. 7).

        "mixture": those that the layer normalised with, Eq. 9. "batch": those of the batches themselves. With
        `momentum`, a moving average that starts from the global statistics takes the place of the pooling (Table 6).
        """
        if not hasattr(self, "_count"):
            # Not persistent: they are no part of the model. Allocated once: a captured graph keeps writing to them.
            self.register_buffer("_count", self.running_mean.new_zeros((), dtype=torch.int64), persistent=False)
            self.register_buffer("_mean", torch.zeros_like(self.running_mean), persistent=False)
            self.register_buffer("_var", torch.zeros_like(self.running_var), persistent=False)
        for recorded, start in ((self._mean, self.running_mean), (self._var, self.running_var)):
            recorded.zero_() if momentum is None else recorded.copy_(start)
        self._count.zero_()
        self.record, self.recording_momentum = what, momentum

    def recorded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Record no more: mean, biased variance and number of samples since `start_recording`."""
        self.record = None
        return self._mean.clone(), self._var.clone(), self._count.clone()

    def _remember(self, mean: Tensor, var: Tensor, samples: int) -> None:
        """Law of total variance, as a running update that never asks the device for a number."""
        self._count.add_(samples)
        if self.recording_momentum is not None:
            self._mean.lerp_(mean, self.recording_momentum)
            self._var.lerp_(var, self.recording_momentum)
            return
        part = samples / self._count.to(mean.dtype)
        delta = mean - self._mean
        self._var.lerp_(var, part).add_(part * (1 - part) * delta.square())
        self._mean.add_(part * delta)


class HybridBatchNorm2d(HybridBatchNorm):
    """HBN for (N, C, H, W): see `HybridBatchNorm`."""


def hybrid_norms(model: nn.Module) -> dict[str, HybridBatchNorm]:
    """Every HybridBatchNorm of a model by its name in `named_modules()`."""
    return {name: module for name, module in model.named_modules() if isinstance(module, HybridBatchNorm)}


def recorded_moments(layers: Mapping[str, HybridBatchNorm]) -> dict[str, Tensor]:
    """Stop recording; mean and variance of each layer under the names of its statistics in `state_dict()`."""
    moments: dict[str, Tensor] = {}
    for name, layer in layers.items():
        moments |= zip(moment_names(name), layer.recorded()[:2], strict=True)
    return moments


def to_hybrid(model: nn.Module, mix: str = "learned") -> list[str]:
    """Replace every batch norm by HBN with the same affine parameters and running statistics; returns the names.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> to_hybrid(model), type(model[1]).__name__
    (['1'], 'HybridBatchNorm2d')
    """

    def build(_: str, norm: BatchNorm) -> nn.Module:
        hybrid = HybridBatchNorm2d if isinstance(norm, nn.BatchNorm2d) else HybridBatchNorm
        return hybrid(norm.num_features, eps=norm.eps, affine=norm.affine, mix=mix)

    return replace_batch_norms(model, build, "HBN")
