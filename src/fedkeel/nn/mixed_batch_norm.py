"""Other ways to use the global statistics in local training: the alternatives of GReg's Table 9, and FBN.

For the length of a `with` block, the batch norms of a model compute something else; the layers, their names and their
tensors stay the same. Nothing waits for the device. As in training, the layers' own running statistics are updated from
the moments of the batch, whatever was used to normalise it. A layer that is not training (a single sample, see
`frozen_statistics`) or keeps no running statistics does what it always does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedkeel.errors import FedkeelError, nearest
from fedkeel.nn.norm_relu import FUSED

MIXTURES = ("global", "mix", "mix-learned", "ensemble")
SHARE = "share"
"""Name of the parameter that "mix-learned" adds to each batch norm: sigmoid(share) is lambda."""

Forward = Callable[[str, _BatchNorm, Tensor], Tensor]


@contextmanager
def replaced_forward(norms: Mapping[str, nn.Module], forward: Forward, relu: Forward | None = None) -> Iterator[None]:
    """Inside, each batch norm computes `forward(name, norm, x)`, then the submodules that timm puts into its norms.

    `relu`, where given, computes layer and ReLU at once (`nn.norm_relu`).
    """

    def call(name: str, norm: _BatchNorm, x: Tensor) -> Tensor:
        y = forward(name, norm, x)
        for child in norm.children():
            y = child(y)
        return y

    layers = {name: norm for name, norm in norms.items() if isinstance(norm, _BatchNorm)}
    before = {name: dict(norm.__dict__) for name, norm in layers.items()}
    try:
        for name, norm in layers.items():
            norm.__dict__["forward"] = partial(call, name, norm)
            if relu is not None and not any(norm.children()):
                norm.__dict__[FUSED] = partial(relu, name, norm)
        yield
    finally:
        for name, norm in layers.items():
            for attribute in ("forward", FUSED):
                norm.__dict__.pop(attribute, None)
                if attribute in before[name]:
                    norm.__dict__[attribute] = before[name][attribute]


def global_moments(name: str, norm: _BatchNorm, statistics: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The given mean and variance of a layer; its own running ones where none are given."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    prefix = f"{name}." if name else ""
    mean = statistics.get(f"{prefix}running_mean", norm.running_mean)
    return mean, statistics.get(f"{prefix}running_var", norm.running_var)


def update_momentum(norm: _BatchNorm) -> float:
    """Count one more batch; returns what it weighs in the running statistics, as `nn.BatchNorm2d` has it."""
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:  # the plain mean over all batches: torch itself asks the device for the number
            return 1.0 / float(norm.num_batches_tracked)
    return 0.0 if norm.momentum is None else norm.momentum


def plain_forward(norm: _BatchNorm, x: Tensor) -> Tensor:
    """What the layer does by itself: batch statistics in training, running ones otherwise."""
    if norm.running_mean is None:
        return F.batch_norm(x, None, None, norm.weight, norm.bias, True, 0.0, norm.eps)
    momentum = update_momentum(norm) if norm.training else 0.0
    return F.batch_norm(
        x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.training, momentum, norm.eps
    )


def add_shares(norms: Mapping[str, nn.Module]) -> None:
    """One learnable lambda for each layer, from 1/2: the `share` of "mix-learned"."""
    for norm in norms.values():
        if isinstance(norm, _BatchNorm) and norm.running_mean is not None:
            norm.register_parameter(SHARE, nn.Parameter(norm.running_mean.new_zeros(())))


@contextmanager
def mixed_statistics(
    norms: Mapping[str, nn.Module], statistics: Mapping[str, Tensor], mode: str, share: float = 0.5
) -> Iterator[None]:
    """Inside, batch norms in training use batch and global statistics as a row of GReg's Table 9 does.

    - "global": (x - mu_g) / sqrt(var_g + eps)
    - "mix": the same with (1 - lambda) mu_b + lambda mu_g and that mixture of the variances; lambda = `share`
    - "mix-learned": with the layer's own lambda = sigmoid(share), see `add_shares`
    - "ensemble": the mean of (x - mu_b) / sqrt(var_b + eps) and (x - mu_g) / sqrt(var_g + eps)
    """
    if mode not in MIXTURES:
        raise FedkeelError(f"Statistics cannot be mixed by '{mode}': {nearest(str(mode), MIXTURES)}")

    def forward(name: str, norm: _BatchNorm, x: Tensor) -> Tensor:
        if not norm.training or norm.running_mean is None:
            return plain_forward(norm, x)
        mean, var = global_moments(name, norm, statistics)
        if mode in ("mix", "mix-learned"):
            learned = getattr(norm, SHARE, None)
            part = torch.sigmoid(learned) if mode == "mix-learned" and learned is not None else share
            return _mixed(norm, x, mean, var, part)
        under_global = F.batch_norm(x, mean, var, norm.weight, norm.bias, False, 0.0, norm.eps)
        if mode == "ensemble":
            return (plain_forward(norm, x) + under_global) / 2
        _update(norm, *_moments(x.detach()), x.numel() // x.shape[1])
        return under_global

    with replaced_forward(norms, forward):
        yield


@contextmanager
def averaged_statistics(
    norms: Mapping[str, nn.Module], statistics: Mapping[str, Tensor], steps: Mapping[str, Tensor]
) -> Iterator[None]:
    """Inside, batch norms use the given statistics, and their running ones become the plain mean over batches (FBN).

    `steps` holds the number of batches so far for each layer, as a tensor on its device; it is counted on here.
    """

    def forward(name: str, norm: _BatchNorm, x: Tensor) -> Tensor:
        if norm.running_mean is None:
            return plain_forward(norm, x)
        mean, var = global_moments(name, norm, statistics)
        if norm.training:
            with torch.no_grad():
                batch_mean, batch_var = _moments(x)
                steps[name].add_(1)
                assert norm.running_var is not None
                norm.running_mean.lerp_(batch_mean.to(norm.running_mean.dtype), 1 / steps[name])
                norm.running_var.lerp_(batch_var.to(norm.running_var.dtype), 1 / steps[name])
                update_momentum(norm)
        return F.batch_norm(x, mean, var, norm.weight, norm.bias, False, 0.0, norm.eps)

    with replaced_forward(norms, forward):
        yield


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, in float32 for half precision."""
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    if wide.device.type == "cpu" and not (wide.requires_grad and torch.is_grad_enabled()):
        return measured(wide)
    var, mean = torch.var_mean(wide, [0, *range(2, x.ndim)], correction=0)
    return mean, var


def measured(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same on a CPU and without gradients: with nothing to update, batch norm only measures.

    Several times as fast as torch.var_mean.
    """
    moments: tuple[Tensor, Tensor] = torch.batch_norm_update_stats(x, None, None, 0.0)
    return moments


def _mixed(norm: _BatchNorm, x: Tensor, mean: Tensor, var: Tensor, share: Tensor | float) -> Tensor:
    batch_mean, batch_var = _moments(x)
    _update(norm, batch_mean.detach(), batch_var.detach(), x.numel() // x.shape[1])
    mean = batch_mean + share * (mean - batch_mean)
    scale = torch.rsqrt(batch_var + share * (var - batch_var) + norm.eps)
    scale = scale if norm.weight is None else scale * norm.weight
    shift = -mean * scale if norm.bias is None else norm.bias - mean * scale
    shape = [1, -1] + [1] * (x.ndim - 2)
    return (x * scale.view(shape) + shift.view(shape)).to(x.dtype)


@torch.no_grad()
def _update(norm: _BatchNorm, mean: Tensor, var: Tensor, count: int) -> None:
    """Eqs. 2-3 of GReg: the moving average of the batch's mean and unbiased variance over `count` values."""
    momentum = update_momentum(norm)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), momentum)
    norm.running_var.lerp_((var * (count / max(count - 1, 1))).to(norm.running_var.dtype), momentum)
