"""Batch norm under a mixture of the batch's statistics and the federation's: HBN, GReg's Table 9, and FBN.

    y = gamma (x - m) / sqrt(v + eps) + beta,    m = a mu_g + (1 - a) mu_b,    v = a sigma_g^2 + (1 - a) sigma_b^2

`mixed` computes it for any share a. HBN has a layer of its own for it; for the others, the batch norms of a model
compute something else for the length of a `with` block, and the layers, their names and their tensors stay the same. As
in training, the layers' own running statistics are updated from the moments of the batch, whatever was used to
normalise it. A layer that is not training (a single sample, see `frozen_statistics`) or keeps no running statistics
does what it always does. Nothing waits for the device.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedkeel.core.state import BatchNorm, moment_names
from fedkeel.formulas.similarity import precise
from fedkeel.nn.surgery import Norms

SHARE = "share"
"""Name of the parameter that "mix-learned" adds to each batch norm: sigmoid(share) is lambda."""

Forward = Callable[[str, BatchNorm, Tensor], Tensor]


# -- the mixture -------------------------------------------------------------------------------------------------------
def mixed(
    x: Tensor, share: Tensor, given: tuple[Tensor, Tensor], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """y, and the batch's mean and biased variance, without gradients.

    Args:
        share: a, of the given statistics, for each channel.
        given: the federation's mean and variance.
    """
    batch: list[Tensor] = []
    y: Tensor = _Mixed.apply(x, share, *given, weight, bias, eps, batch)  # type: ignore[no-untyped-call]
    return y, batch[0], batch[1]


class _Mixed(torch.autograd.Function):
    """The gradient is written out: autograd would pass over the whole activation about ten times, this does five times.

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


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, in float32 for half precision."""
    wide = precise(x)
    if wide.device.type == "cpu" and not (wide.requires_grad and torch.is_grad_enabled()):
        # With nothing to update, batch norm only measures: several times as fast as torch.var_mean, without gradients.
        measured: tuple[Tensor, Tensor] = torch.batch_norm_update_stats(wide, None, None, 0.0)
        return measured
    var, mean = torch.var_mean(wide, all_but_channels(x), correction=0)
    return mean, var


def all_but_channels(x: Tensor) -> list[int]:
    """The dimensions over which batch norm takes moments."""
    return [0, *range(2, x.ndim)]


def per_channel(numbers: Tensor, x: Tensor) -> Tensor:
    """One number for each channel, in the shape in which it meets `x`."""
    return numbers.view(1, -1, *[1] * (x.ndim - 2))


# -- for the length of a block -----------------------------------------------------------------------------------------
@contextmanager
def replaced_forward(norms: Norms, forward: Forward) -> Iterator[None]:
    """Inside, each batch norm computes `forward(name, norm, x)`, then the submodules that timm puts into its norms."""

    def call(name: str, norm: BatchNorm, x: Tensor) -> Tensor:
        y = forward(name, norm, x)
        for child in norm.children():
            y = child(y)
        return y

    try:
        for name, norm in norms.items():
            norm.forward = partial(call, name, norm)  # type: ignore[method-assign]
        yield
    finally:
        for norm in norms.values():
            vars(norm).pop("forward", None)


def running_moments(norm: BatchNorm) -> tuple[Tensor, Tensor]:
    """Of a layer that has them."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return norm.running_mean, norm.running_var


def given_moments(name: str, norm: BatchNorm, statistics: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The given mean and variance of a layer; its own running ones where none are given."""
    (given_mean, given_var), (mean, var) = moment_names(name), running_moments(norm)
    return statistics.get(given_mean, mean), statistics.get(given_var, var)


def plain_forward(norm: BatchNorm, x: Tensor) -> Tensor:
    """What the layer does by itself, without its submodules: batch statistics in training, running ones otherwise."""
    return nn.BatchNorm2d.forward(cast(nn.BatchNorm2d, norm), x)


def forward_under(norm: BatchNorm, x: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
    """What the layer does with the given mean and variance."""
    return F.batch_norm(x, *given, norm.weight, norm.bias, False, 0.0, norm.eps)


def update_momentum(norm: BatchNorm) -> float:
    """Count one more batch; returns what it weighs in the running statistics, as `nn.BatchNorm2d` has it."""
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:  # the plain mean over all batches: torch itself asks the device for the number
            return 1.0 / float(norm.num_batches_tracked)
    return 0.0 if norm.momentum is None else norm.momentum


@torch.no_grad()
def update_statistics(norm: BatchNorm, mean: Tensor, var: Tensor, count: int) -> None:
    """GReg Eqs. 2-3: the moving average of a batch's mean and of its variance over `count` values, without bias."""
    momentum, running = update_momentum(norm), running_moments(norm)
    for old, new in zip(running, (mean, var * (count / max(count - 1, 1))), strict=True):
        old.lerp_(new.to(old.dtype), momentum)


def add_shares(norms: Norms) -> None:
    """One learnable lambda for each layer, from 1/2: the `share` of "mix-learned"."""
    for norm in norms.values():
        if norm.running_mean is not None:
            norm.register_parameter(SHARE, nn.Parameter(norm.running_mean.new_zeros(())))


def mixed_statistics(
    norms: Norms, statistics: Mapping[str, Tensor], mode: str, share: float = 0.5
) -> AbstractContextManager[None]:
    """Inside, batch norms in training use batch and global statistics as a row of GReg's Table 9 does.

    - "global": the global statistics alone
    - "mix": the mixture in which these have the share lambda
    - "mix-learned": with the layer's own lambda = sigmoid(share), see `add_shares`
    - "ensemble": the mean of what the layer gives under the batch's and under the global ones
    """

    def forward(name: str, norm: BatchNorm, x: Tensor) -> Tensor:
        if not norm.training or norm.running_mean is None:
            return plain_forward(norm, x)
        given = given_moments(name, norm, statistics)
        if mode == "ensemble":
            return (plain_forward(norm, x) + forward_under(norm, x, given)) / 2
        if mode == "mix-learned":
            shares = torch.sigmoid(norm.get_parameter(SHARE)).expand_as(given[0])
        else:
            shares = torch.full_like(given[0], 1.0 if mode == "global" else share)
        y, mean, var = mixed(x, shares, given, norm.weight, norm.bias, norm.eps)
        update_statistics(norm, mean, var, x.numel() // x.shape[1])
        return y

    return replaced_forward(norms, forward)


def averaged_statistics(
    norms: Norms, statistics: Mapping[str, Tensor], steps: Mapping[str, Tensor]
) -> AbstractContextManager[None]:
    """Inside, batch norms use the given statistics, and their running ones become the plain mean over batches (FBN), of
    which each layer's are counted in `steps`."""

    def forward(name: str, norm: BatchNorm, x: Tensor) -> Tensor:
        if norm.running_mean is None:
            return plain_forward(norm, x)
        given = given_moments(name, norm, statistics)
        if norm.training:
            with torch.no_grad():
                steps[name].add_(1)
                for running, measured in zip(running_moments(norm), moments(x), strict=True):
                    running.lerp_(measured.to(running.dtype), 1 / steps[name])
                update_momentum(norm)
        return forward_under(norm, x, given)

    return replaced_forward(norms, forward)
