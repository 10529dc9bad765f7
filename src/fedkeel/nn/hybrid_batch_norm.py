"""Hybrid Batch Normalisation (Chen et al., "Hybrid Batch Normalisation", ICML 2025).

A batch of a client says little about the federation, and global statistics say little about this step: HBN mixes both,
in a proportion that every client learns for every channel (Eq. 9).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedkeel.core.state import BatchNorm, moment_names
from fedkeel.errors import FedkeelError, MethodError, nearest
from fedkeel.nn.kernels import norms
from fedkeel.nn.mixed_batch_norm import moments, per_channel
from fedkeel.nn.surgery import place_of, replace_batch_norms

RECORDS = ("mixture", "batch")
SHARES = {"learned": None, "fixed": 0.5, "global": 1.0, "batch": 0.0}  # of the global statistics, in the ablations


class _Normalise(torch.autograd.Function):
    """y = weight (x - m) / sqrt(v + eps) + bias with m, v of Eq. 9; `batch` gets the batch's mean and variance.

    The gradient is written out: autograd would pass over the whole activation about ten times, this does five times.
    With r = (v + eps)^-1/2, S = sum(dy) and T = sum(dy (x - m)) over a channel's n values:
    d weight = r T, d bias = S, dm = -weight r S, dv = -weight r^3 T / 2,
    da = dm (mg - mb) + dv (vg - vb), dx = weight r dy + (1 - a) (dm + 2 dv (x - mb)) / n.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        share: Tensor,
        global_mean: Tensor,
        global_var: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        batch: list[Tensor],
    ) -> Tensor:
        batch_mean, batch_var = moments(x)
        batch.extend((batch_mean, batch_var))  # as outputs they would have gradients, of zeros, to be made each time
        mean = torch.lerp(batch_mean, global_mean, share)
        var = torch.lerp(batch_var, global_var, share)
        inverse = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, share, global_mean, global_var, weight, batch_mean, batch_var, mean, inverse, var)
        ctx.eps, ctx.has_bias = eps, bias is not None
        return F.batch_norm(x.to(mean.dtype), mean, var, weight, bias, False, 0.0, eps).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, share, global_mean, global_var, weight, batch_mean, batch_var, mean, inverse, var = ctx.saved_tensors
        wide, dy = x.to(mean.dtype), dy.to(mean.dtype)
        if x.is_cuda and dy.stride() != wide.stride():  # its kernel wants both in one layout
            dy = torch.empty_like(wide).copy_(dy)
        # Both sums, r T and S, in one pass: they are the gradients of a batch norm in evaluation. The weight is not
        # looked at.
        _, scaled_sum, sum_dy = torch.ops.aten.native_batch_norm_backward(
            dy, wide, inverse, mean, var, mean, inverse, False, ctx.eps, [False, True, True]
        )
        # Numbers go in as `value`: in `1 - share` each costs a CPU more than the few channels do.
        scale = inverse if weight is None else weight * inverse
        u = scale * sum_dy  # -dm
        q = scale * inverse * scaled_sum  # -2 dv
        d_share = (u * (batch_mean - global_mean)).addcmul_(q, batch_var - global_var, value=0.5)
        # dx as one linear function of dy and x: scale dy + slope x + offset
        slope = torch.addcmul(q, share, q, value=-1)
        offset = torch.addcmul(u, share, u, value=-1).addcmul_(slope, batch_mean, value=-1)
        torch._foreach_mul_([slope, offset], -x.shape[1] / x.numel())
        offset, slope, scale = (per_channel(numbers, x) for numbers in (offset, slope, scale))
        dx = torch.addcmul(torch.addcmul(offset, wide, slope), dy, scale)
        d_weight = None if weight is None else scaled_sum
        return dx.to(x.dtype), d_share, None, None, d_weight, sum_dy if ctx.has_bias else None, None, None


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
        device, dtype: of its tensors.

    Attributes:
        dims: how many dimensions an input may have.

    >>> layer = HybridBatchNorm2d(1, eps=0)
    >>> layer(torch.tensor([6.0, 8.0]).view(2, 1, 1, 1)).flatten().tolist()  # m = 7 / 2, v = (1 + 1) / 2
    [2.5, 4.5]
    """

    running_mean: Tensor
    running_var: Tensor
    _count: Tensor
    _mean: Tensor
    _var: Tensor

    dims: Sequence[int] = (2, 3, 4, 5)

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        affine: bool = True,
        mix: str = "learned",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if mix not in SHARES:
            raise FedkeelError(f"HybridBatchNorm has no mix '{mix}': {nearest(str(mix), SHARES)}")
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_features = num_features
        self.eps = eps
        self.affine = affine
        self.mix, self.constant = mix, SHARES[mix]
        self.weight = nn.Parameter(torch.ones(num_features, **place)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features, **place)) if affine else None
        self.alpha = nn.Parameter(torch.zeros(num_features, **place), requires_grad=mix == "learned")
        self.register_buffer("running_mean", torch.zeros(num_features, **place))
        self.register_buffer("running_var", torch.ones(num_features, **place))
        self.tested_by_batch = False
        self.record: str | None = None
        self.recording_momentum: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim not in self.dims:
            raise ValueError(f"expected {' or '.join(f'{d}D' for d in self.dims)} input (got {x.ndim}D input)")
        if not self.training:
            if self.tested_by_batch:
                return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        statistics = (self.running_mean, self.running_var)
        if norms.takes("hybrid", x, self.alpha, self.weight, self.bias, *statistics):
            return norms.hybrid(x, self)
        share = self.share()
        batch: list[Tensor] = []
        y: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, share, *statistics, self.weight, self.bias, self.eps, batch
        )
        if self.record is not None:
            with torch.no_grad():
                mean, var = batch
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
        if what not in RECORDS:
            raise FedkeelError(f"HybridBatchNorm does not record '{what}': {nearest(str(what), RECORDS)}")
        if not hasattr(self, "_count"):
            # Not persistent: they are no part of the model. Allocated once: a captured graph keeps writing to them.
            self.register_buffer("_count", self.running_mean.new_zeros((), dtype=torch.int64), persistent=False)
            self.register_buffer("_mean", torch.zeros_like(self.running_mean), persistent=False)
            self.register_buffer("_var", torch.zeros_like(self.running_var), persistent=False)
        self._count.zero_()
        if momentum is None:
            self._mean.zero_()
            self._var.zero_()
        else:
            self._mean.copy_(self.running_mean)
            self._var.copy_(self.running_var)
        self.record, self.recording_momentum = what, momentum

    def recorded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Record no more: mean, biased variance and number of samples since `start_recording`."""
        if self.record is None:
            raise MethodError("This HybridBatchNorm has recorded nothing: call start_recording() before the pass.")
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

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}, mix={self.mix}"


class HybridBatchNorm1d(HybridBatchNorm):
    """HBN for (N, C) and (N, C, L): see `HybridBatchNorm`."""

    dims = (2, 3)


class HybridBatchNorm2d(HybridBatchNorm):
    """HBN for (N, C, H, W): see `HybridBatchNorm`."""

    dims = (4,)


class HybridBatchNorm3d(HybridBatchNorm):
    """HBN for (N, C, D, H, W): see `HybridBatchNorm`."""

    dims = (5,)


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
    kinds = {
        nn.BatchNorm1d: HybridBatchNorm1d,
        nn.BatchNorm2d: HybridBatchNorm2d,
        nn.BatchNorm3d: HybridBatchNorm3d,
        nn.SyncBatchNorm: HybridBatchNorm,
    }

    def build(_: str, norm: BatchNorm) -> nn.Module:
        hybrid = next(new for old, new in kinds.items() if isinstance(norm, old))
        new = hybrid(norm.num_features, eps=norm.eps, affine=norm.affine, mix=mix, **place_of(norm))
        if norm.running_mean is not None and norm.running_var is not None:
            new.running_mean.copy_(norm.running_mean)
            new.running_var.copy_(norm.running_var)
        return new

    return replace_batch_norms(model, build, "HBN")
