"""Other ways to use the global statistics in local training: the alternatives of GReg's Table 9, and FBN.

For the length of a `with` block, the batch norms of a model compute something else; the layers, their names and their
tensors stay the same. Nothing waits for the device. As in training, the layers' own running statistics are updated from
the moments of the batch, whatever was used to normalise it. A layer that is not training (a single sample, see
`frozen_statistics`) or keeps no running statistics does what it always does.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.core.state import BatchNorm, moment_names
from fedkeel.errors import FedkeelError, nearest
from fedkeel.formulas.similarity import precise
from fedkeel.nn.surgery import Change, Norms, changed

MIXTURES = ("global", "mix", "mix-learned", "ensemble")
SHARE = "share"
"""Name of the parameter that "mix-learned" adds to each batch norm: sigmoid(share) is lambda."""
STEPS = "_steps"
"""Name of FBN's buffer in each batch norm: the batches of this client so far."""

Forward = Callable[[str, BatchNorm, Tensor], Tensor]


def replaced_forward(norms: Norms, forward: Forward, skipped: Iterable[nn.Module] = ()) -> AbstractContextManager[None]:
    """Inside, each batch norm computes `forward(name, norm, x)`, then the submodules that timm puts into its norms; the
    `skipped` modules hand on what they get."""

    def call(name: str, norm: BatchNorm, x: Tensor) -> Tensor:
        y = forward(name, norm, x)
        for child in norm.children():
            y = child(y)
        return y

    changes: list[Change] = [(vars(norm), "forward", partial(call, name, norm)) for name, norm in norms.items()]
    return changed(changes + [(vars(module), "forward", _handed_on) for module in skipped])


def _handed_on(x: Tensor) -> Tensor:
    return x


def global_moments(name: str, norm: BatchNorm, statistics: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The given mean and variance of a layer; its own running ones where none are given."""
    mean, var = running_moments(norm)
    given_mean, given_var = moment_names(name)
    return statistics.get(given_mean, mean), statistics.get(given_var, var)


def running_moments(norm: BatchNorm) -> tuple[Tensor, Tensor]:
    """Of a layer that has them."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return norm.running_mean, norm.running_var


def update_momentum(norm: BatchNorm) -> float:
    """Count one more batch; returns what it weighs in the running statistics, as `nn.BatchNorm2d` has it."""
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
        if norm.momentum is None:  # the plain mean over all batches: torch itself asks the device for the number
            return 1.0 / float(norm.num_batches_tracked)
    return 0.0 if norm.momentum is None else norm.momentum


def plain_forward(norm: BatchNorm, x: Tensor) -> Tensor:
    """What the layer does by itself, without its submodules: batch statistics in training, running ones otherwise."""
    return nn.BatchNorm2d.forward(cast(nn.BatchNorm2d, norm), x)


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


def add_shares(norms: Norms) -> None:
    """One learnable lambda for each layer, from 1/2: the `share` of "mix-learned"."""
    for norm in norms.values():
        if norm.running_mean is not None:
            norm.register_parameter(SHARE, nn.Parameter(norm.running_mean.new_zeros(())))


def mixed_statistics(
    norms: Norms, statistics: Mapping[str, Tensor], mode: str, share: float = 0.5
) -> AbstractContextManager[None]:
    """Inside, batch norms in training use batch and global statistics as a row of GReg's Table 9 does.

    - "global": (x - mu_g) / sqrt(var_g + eps)
    - "mix": the same with (1 - lambda) mu_b + lambda mu_g and that mixture of the variances; lambda = `share`
    - "mix-learned": with the layer's own lambda = sigmoid(share), see `add_shares`
    - "ensemble": the mean of (x - mu_b) / sqrt(var_b + eps) and (x - mu_g) / sqrt(var_g + eps)
    """
    if mode not in MIXTURES:
        raise FedkeelError(f"Statistics cannot be mixed by '{mode}': {nearest(str(mode), MIXTURES)}")

    def forward(name: str, norm: BatchNorm, x: Tensor) -> Tensor:
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
        _update(norm, *moments(x.detach()), x.numel() // x.shape[1])
        return under_global

    return replaced_forward(norms, forward)


def count_steps(norms: Norms) -> None:
    """A counter for each layer, for `averaged_statistics`."""
    for norm in norms.values():
        if norm.running_mean is not None:
            # Not persistent: no part of the model, and 0 again for the next client. A captured graph keeps counting.
            norm.register_buffer(STEPS, norm.running_mean.new_zeros(()), persistent=False)


def averaged_statistics(norms: Norms, statistics: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Inside, batch norms use the given statistics, and their running ones become the plain mean over batches (FBN),
    which `count_steps` has them count."""

    def forward(name: str, norm: BatchNorm, x: Tensor) -> Tensor:
        if norm.running_mean is None:
            return plain_forward(norm, x)
        mean, var = global_moments(name, norm, statistics)
        if norm.training:
            with torch.no_grad():
                steps: Tensor = getattr(norm, STEPS).add_(1)
                for running, measured in zip(running_moments(norm), moments(x), strict=True):
                    running.lerp_(measured.to(running.dtype), 1 / steps)
                update_momentum(norm)
        return F.batch_norm(x, mean, var, norm.weight, norm.bias, False, 0.0, norm.eps)

    return replaced_forward(norms, forward)


def _mixed(norm: BatchNorm, x: Tensor, mean: Tensor, var: Tensor, share: Tensor | float) -> Tensor:
    batch_mean, batch_var = moments(x)
    _update(norm, batch_mean.detach(), batch_var.detach(), x.numel() // x.shape[1])
    mean = batch_mean + share * (mean - batch_mean)
    scale = torch.rsqrt(batch_var + share * (var - batch_var) + norm.eps)
    scale = scale if norm.weight is None else scale * norm.weight
    shift = -mean * scale if norm.bias is None else norm.bias - mean * scale
    return (x * per_channel(scale, x) + per_channel(shift, x)).to(x.dtype)


@torch.no_grad()
def _update(norm: BatchNorm, mean: Tensor, var: Tensor, count: int) -> None:
    """Eqs. 2-3 of GReg: the moving average of the batch's mean and unbiased variance over `count` values."""
    momentum = update_momentum(norm)
    running_mean, running_var = running_moments(norm)
    running_mean.lerp_(mean.to(running_mean.dtype), momentum)
    running_var.lerp_((var * (count / max(count - 1, 1))).to(running_var.dtype), momentum)
