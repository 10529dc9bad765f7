"""Hybrid Batch Normalisation (Chen et al., "Hybrid Batch Normalisation", ICML 2025).

A batch of a client says little about the federation, and global statistics say little about this step: HBN mixes both,
in a proportion that every client learns for every channel (Eq. 9).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from fedkeel.errors import FedkeelError, MethodError, nearest
from fedkeel.nn.kernels import fused
from fedkeel.nn.mixed_batch_norm import measured
from fedkeel.nn.surgery import copy_affine, replace_modules, with_tail

MIXES = ("learned", "fixed", "global", "batch")
RECORDS = ("mixture", "batch")
SHARES = {"fixed": 0.5, "global": 1.0, "batch": 0.0}  # of the global statistics, in the ablations


def _channels(x: Tensor) -> list[int]:
    """The shape in which a tensor of one number per channel meets `x`."""
    return [1, -1] + [1] * (x.ndim - 2)


def _moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, in float32 for half precision."""
    if x.is_cuda:  # one pass over the activation, in its own precision and memory format
        mean, inverse = torch.batch_norm_stats(x, eps)
        return mean, (inverse.square().reciprocal() - eps).clamp_min(0)
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    return measured(wide)


def _backward_on_gpu(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The same gradient in two passes, by the kernels of synchronised batch norm.

    They compute weight r (dy - S/n - r^2 (x - mean) T/n) for a mean, S and T of our choice: with the batch's mean and
    (1 - a) S, (1 - a) T that is dx.
    """
    x, share, global_mean, global_var, weight, batch_mean, batch_var, mean, inverse, _ = ctx.saved_tensors
    dy = dy if dy.stride() == x.stride() else dy.contiguous(memory_format=_memory_format(x))
    sums = torch.batch_norm_backward_reduce(dy, x, mean, inverse, weight, True, weight is not None, ctx.has_bias)
    sum_dy, sum_dy_centred, d_weight, d_bias = sums
    scale = inverse if weight is None else weight * inverse
    d_share = -scale * sum_dy * (global_mean - batch_mean)
    d_share = d_share - 0.5 * scale * inverse.square() * sum_dy_centred * (global_var - batch_var)
    count = torch.full((1,), x.numel() // x.shape[1], dtype=torch.int32, device=x.device)
    rest = 1 - share
    dx = torch.batch_norm_backward_elemt(
        dy, x, batch_mean, inverse, weight, rest * sum_dy, rest * sum_dy_centred, count
    )
    affine = (d_weight if weight is not None else None, d_bias if ctx.has_bias else None)
    return dx, d_share, None, None, *affine, None, None


def _memory_format(x: Tensor) -> torch.memory_format:
    last = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format


class _Normalise(torch.autograd.Function):
    """y = weight (x - m) / sqrt(v + eps) + bias with m, v of Eq. 9; `moments` gets the batch's mean and variance.

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
        moments: list[Tensor],
    ) -> Tensor:
        batch_mean, batch_var = _moments(x, eps)
        moments.extend((batch_mean, batch_var))  # as outputs they would have gradients, of zeros, to be made each time
        mean = torch.lerp(batch_mean, global_mean, share)
        var = torch.lerp(batch_var, global_var, share)
        inverse = torch.rsqrt(var + eps)
        if x.is_cuda:
            y = torch.batch_norm_elemt(x, weight, bias, mean, inverse, eps)
        else:
            y = F.batch_norm(x.to(mean.dtype), mean, var, weight, bias, False, 0.0, eps).to(x.dtype)
        ctx.save_for_backward(x, share, global_mean, global_var, weight, batch_mean, batch_var, mean, inverse, var)
        ctx.eps = eps
        ctx.has_bias = bias is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, share, global_mean, global_var, weight, batch_mean, batch_var, mean, inverse, var = ctx.saved_tensors
        if x.is_cuda:
            return _backward_on_gpu(ctx, dy)
        wide, dy = x.to(mean.dtype), dy.to(mean.dtype)
        # Both sums, r T and S, in one pass: they are the gradients of a batch norm in evaluation.
        _, scaled_sum, sum_dy = torch.ops.aten.native_batch_norm_backward(
            dy, wide, None, mean, var, None, None, False, ctx.eps, [False, True, True]
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
        shape = _channels(x)
        dx = torch.addcmul(torch.addcmul(offset.view(shape), wide, slope.view(shape)), dy, scale.view(shape))
        d_weight = None if weight is None else scaled_sum
        return dx.to(x.dtype), d_share, None, None, d_weight, sum_dy if ctx.has_bias else None, None, None


class HybridBatchNorm(nn.Module):
    """HBN for inputs (N, C, ...): Eqs. 1, 9 and 10.

    Learnable: `weight`, `bias` (gamma, beta) and `alpha`, one per channel, initially 0; sigmoid(alpha) is the share of
    the *global* statistics in the mixture. Buffers: `running_mean`, `running_var`, the global statistics, set by the
    server and never by a forward. In evaluation the global statistics alone are used, or, inside
    `fedkeel.nn.batch_statistics`, those of the batch alone.

    `mix` gives HBN's ablations (Table 6): "fixed" is 1:1, "global" and "batch" use one of the two.
    """

    running_mean: Tensor
    running_var: Tensor
    _count: Tensor
    _mean: Tensor
    _var: Tensor

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
        if mix not in MIXES:
            raise FedkeelError(f"HybridBatchNorm has no mix '{mix}': {nearest(str(mix), MIXES)}")
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_features = num_features
        self.eps = eps
        self.affine = affine
        self.mix = mix
        self.weight = nn.Parameter(torch.ones(num_features, **place)) if affine else None
        self.bias = nn.Parameter(torch.zeros(num_features, **place)) if affine else None
        self.alpha = nn.Parameter(torch.zeros(num_features, **place), requires_grad=mix == "learned")
        self.register_buffer("running_mean", torch.zeros(num_features, **place))
        self.register_buffer("running_var", torch.ones(num_features, **place))
        self.tested_by_batch = False
        self.record: str | None = None
        self.recording_momentum: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        if not self.training:
            if self.tested_by_batch:
                return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        others = (self.weight, self.bias, self.running_mean, self.running_var)
        if fused.can_mix(x, self.alpha, others):
            return fused.hybrid_norm(
                x,
                self.alpha,
                SHARES.get(self.mix),
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                self.eps,
                self._recording(),
            )
        share = self.share()
        moments: list[Tensor] = []
        y: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            x, share, self.running_mean, self.running_var, self.weight, self.bias, self.eps, moments
        )
        if self.record is not None:
            with torch.no_grad():
                batch_mean, batch_var = moments
                if self.record == "mixture":
                    batch_mean = torch.lerp(batch_mean, self.running_mean, share)
                    batch_var = torch.lerp(batch_var, self.running_var, share)
                self._remember(batch_mean, batch_var, x.shape[0])
        return y

    def share(self) -> Tensor:
        """The share of the global statistics per channel: sigmoid(alpha), or the constant of an ablation."""
        if self.mix == "learned":
            return torch.sigmoid(self.alpha)
        return torch.full_like(self.alpha, SHARES[self.mix])

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

    def stop_recording(self) -> None:
        """Record no more; what was recorded stays."""
        self.record = None

    def recorded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, biased variance and number of samples since `start_recording`."""
        if not hasattr(self, "_count"):
            raise MethodError("This HybridBatchNorm has recorded nothing: call start_recording() before the pass.")
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

    def _recording(self) -> fused.Recording | None:
        """What `_remember` needs to know, for the kernel that does the same."""
        if self.record is None:
            return None
        return fused.Recording(self.record == "mixture", self._count, self._mean, self._var, self.recording_momentum)

    def _check_input(self, x: Tensor) -> None:
        if x.ndim < 2:
            raise ValueError(f"expected at least 2D input (got {x.ndim}D input)")

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}, mix={self.mix}"


class HybridBatchNorm1d(HybridBatchNorm):
    """HBN for (N, C) and (N, C, L)."""

    def _check_input(self, x: Tensor) -> None:
        if x.ndim not in (2, 3):
            raise ValueError(f"expected 2D or 3D input (got {x.ndim}D input)")


class HybridBatchNorm2d(HybridBatchNorm):
    """HBN for (N, C, H, W)."""

    def _check_input(self, x: Tensor) -> None:
        if x.ndim != 4:
            raise ValueError(f"expected 4D input (got {x.ndim}D input)")


class HybridBatchNorm3d(HybridBatchNorm):
    """HBN for (N, C, D, H, W)."""

    def _check_input(self, x: Tensor) -> None:
        if x.ndim != 5:
            raise ValueError(f"expected 5D input (got {x.ndim}D input)")


def hybrid_norms(model: nn.Module) -> dict[str, HybridBatchNorm]:
    """Every HybridBatchNorm of a model by its name in `named_modules()`."""
    return {name: module for name, module in model.named_modules() if isinstance(module, HybridBatchNorm)}


def recorded_moments(layers: Mapping[str, HybridBatchNorm]) -> dict[str, Tensor]:
    """Stop recording; mean and variance of each layer under the names of its statistics in `state_dict()`."""
    moments: dict[str, Tensor] = {}
    for name, layer in layers.items():
        layer.stop_recording()
        moments[f"{name}.running_mean"], moments[f"{name}.running_var"], _ = layer.recorded()
    return moments


def to_hybrid(model: nn.Module, mix: str = "learned") -> list[str]:
    """Replace every batch norm by HBN with the same affine parameters and running statistics; returns the names."""

    def build(_: str, norm: nn.Module) -> nn.Module:
        assert isinstance(norm, _BatchNorm)
        kinds = {
            nn.BatchNorm1d: HybridBatchNorm1d,
            nn.BatchNorm2d: HybridBatchNorm2d,
            nn.BatchNorm3d: HybridBatchNorm3d,
        }
        hybrid = next((new for old, new in kinds.items() if isinstance(norm, old)), HybridBatchNorm)
        tensor = norm.weight if norm.affine else norm.running_mean
        place: dict[str, Any] = {} if tensor is None else {"device": tensor.device, "dtype": tensor.dtype}
        new = hybrid(norm.num_features, eps=norm.eps, affine=norm.affine, mix=mix, **place)
        copy_affine(norm, new)
        if norm.running_mean is not None and norm.running_var is not None:
            new.running_mean.copy_(norm.running_mean)
            new.running_var.copy_(norm.running_var)
        return with_tail(norm, new)

    names = replace_modules(model, lambda _, module: isinstance(module, _BatchNorm), build)
    if not names:
        raise MethodError(f"{type(model).__name__} has no batch norm that HBN could replace: choose another model.")
    return names
