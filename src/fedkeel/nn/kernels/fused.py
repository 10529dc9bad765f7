"""Small arithmetic of layers as single GPU kernels.

Standardising one weight, or mixing two sets of channel statistics, takes PyTorch a dozen kernels of a few microseconds
each way; a network of twenty layers then spends more time on them than on its convolutions. Here they are one Triton
kernel each way. Where Triton is missing or does not run, and for other types than float32, the layers use the PyTorch
code beside them, which says the same: `tests/nn/test_fused.py` compares the two.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedkeel.nn.kernels import channel_rows
from fedkeel.nn.kernels.channel_rows import FORMATS

log = logging.getLogger("fedkeel")
MOST_FAN_IN = 2**16  # of an output channel, which one program holds in registers
CHANNELS = 128  # of a program
_state: dict[int, bool] = {}  # by device: whether kernels run there


class Recording(NamedTuple):
    """Where a HybridBatchNorm pools the moments it sees."""

    mixture: bool
    samples: Tensor
    mean: Tensor
    var: Tensor
    momentum: float | None


@functools.cache
def _kernels() -> Any:
    from fedkeel.nn.kernels import weights as kernels

    return kernels


def runs_on(tensor: Tensor) -> bool:
    """Whether kernels can be launched for this tensor: on the current GPU, in float32, not under a compiler."""
    if not tensor.is_cuda or tensor.dtype != torch.float32 or torch.compiler.is_compiling():
        return False
    index = tensor.device.index
    if index != torch.cuda.current_device():
        return False
    known = _state.get(index)
    if known is None:
        if torch.cuda.is_current_stream_capturing():  # no place for a first try
            return False
        known = _state[index] = _try(tensor.device)
    return known


def _try(device: torch.device) -> bool:
    """Triton may be missing, and where it is not, it needs a C compiler and a GPU that is not too old."""
    try:
        with torch.no_grad():
            weight = torch.tensor([[-1.0, 1.0]], device=device)
            standardised = standardise(weight, weight.new_ones(1, 1), 1e-4)
            return abs(float(standardised[0, 1]) - 0.5) < 1e-5
    except Exception as error:
        reason = str(error).partition("\n")[0]
        log.info("Triton kernels are not used (%s: %s).", type(error).__name__, reason)
        return False


# -- weight standardisation ------------------------------------------------------------------------------------------
def can_standardise(weight: Tensor, gain: Tensor) -> bool:
    fan_in = weight[0].numel() if len(weight) else 0
    dense = weight.is_contiguous() or _last(weight)
    return 1 < fan_in <= MOST_FAN_IN and dense and gain.dtype == torch.float32 and runs_on(weight)


def standardise(weight: Tensor, gain: Tensor, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """gain (W - mean) rsqrt(max(var N, eps)) over the fan-in N of each output channel, in the given type."""
    out: Tensor = _Standardise.apply(weight, gain, eps, dtype)  # type: ignore[no-untyped-call]
    return out


class _Standardise(torch.autograd.Function):
    """With d = W - mean, s the scale, T = sum(dy d) over the N weights of a channel: d gain = s T, and
    dW = gain s (dy - mean(dy) - d T s^2 N / (N - 1)), without the last term where the floor holds s."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        rows = weight.shape[0]
        fan_in = weight.numel() // rows
        out = torch.empty_like(weight, dtype=dtype)
        moments = weight.new_empty(3, rows)
        _kernels().standardise_forward[(rows,)](weight, gain, out, moments, rows, fan_in, eps, **_sizes(fan_in))
        ctx.save_for_backward(weight, gain, moments)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, gain, moments = ctx.saved_tensors
        if not (weight.is_contiguous() and dy.is_contiguous()) and not (_last(weight) and _last(dy)):
            dy = torch.empty_like(weight, dtype=dy.dtype).copy_(dy)
        rows = weight.shape[0]
        fan_in = weight.numel() // rows
        d_weight, d_gain = torch.empty_like(weight), torch.empty_like(gain)
        _kernels().standardise_backward[(rows,)](
            dy, weight, gain, moments, d_weight, d_gain, rows, fan_in, **_sizes(fan_in)
        )
        return d_weight, d_gain, None, None


def _last(tensor: Tensor) -> bool:
    return tensor.ndim in FORMATS and tensor.is_contiguous(memory_format=FORMATS[tensor.ndim])


@functools.cache
def _sizes(fan_in: int) -> dict[str, int]:
    block = max(32, 1 << (fan_in - 1).bit_length())
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 256))}


# -- hybrid batch normalisation --------------------------------------------------------------------------------------
def can_mix(x: Tensor, alpha: Tensor, others: tuple[Tensor | None, ...]) -> bool:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) or x.device != alpha.device or not x.numel():
        return False
    return all(other is None or other.dtype == torch.float32 for other in others) and runs_on(alpha)


def hybrid_norm(
    x: Tensor,
    alpha: Tensor,
    share: float | None,
    global_mean: Tensor,
    global_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    recording: Recording | None = None,
) -> Tensor:
    """HBN's training forward; the share of the global statistics is sigmoid(alpha), or `share` where it is given."""
    if not torch.is_grad_enabled():  # a statistics pass: the host would be the slower side of it
        _, _, mean, inverse, _ = _mix(x, alpha, share, global_mean, global_var, eps, recording)
        return torch.batch_norm_elemt(x, weight, bias, mean, inverse, eps)
    y: Tensor = _HybridNorm.apply(  # type: ignore[no-untyped-call]
        x, alpha, share, global_mean, global_var, weight, bias, eps, recording
    )
    return y


def _mix(
    x: Tensor,
    alpha: Tensor,
    share: float | None,
    global_mean: Tensor,
    global_var: Tensor,
    eps: float,
    recording: Recording | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Mean and variance of the batch, mean and inverse deviation of Eq. 9, and the number of values of a channel."""
    rows = channel_rows.can_run(x)
    batch_mean, batch_inverse = channel_rows.moments(x, eps) if rows else torch.batch_norm_stats(x, eps)
    mean, inverse, batch_var = (torch.empty_like(batch_mean) for _ in range(3))
    count = torch.empty(1, dtype=torch.int32, device=x.device)
    record, momentum = 0, None
    recorded = (count, mean, mean)  # not looked at
    if recording is not None:
        record, momentum = 2 if recording.mixture else 1, recording.momentum
        recorded = recording.samples.add_(x.shape[0]), recording.mean, recording.var
    channels = x.shape[1]
    _kernels().hybrid_forward[(-(-channels // CHANNELS),)](
        alpha,
        0.0 if share is None else share,
        batch_mean,
        batch_inverse,
        global_mean,
        global_var,
        mean,
        inverse,
        batch_var,
        count,
        *recorded,
        channels,
        x.numel() // channels,
        x.shape[0],
        0.0 if momentum is None else momentum,
        eps,
        LEARNED=share is None,
        RECORD=record,
        MOVING=momentum is not None,
        BLOCK=CHANNELS,
    )
    return batch_mean, batch_var, mean, inverse, count


class _HybridNorm(torch.autograd.Function):
    """The passes over the activation are those of synchronised batch norm, as in `hybrid_batch_norm._Normalise`, which
    gives the equations; one kernel each way does all that is per channel, sigmoid and recording included."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        alpha: Tensor,
        share: float | None,
        global_mean: Tensor,
        global_var: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        recording: Recording | None,
    ) -> Tensor:
        batch_mean, batch_var, mean, inverse, count = _mix(x, alpha, share, global_mean, global_var, eps, recording)
        ctx.save_for_backward(x, alpha, global_mean, global_var, weight, batch_mean, batch_var, inverse, mean, count)
        ctx.share, ctx.has_bias = share, bias is not None
        return torch.batch_norm_elemt(x, weight, bias, mean, inverse, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, alpha, global_mean, global_var, weight, batch_mean, batch_var, inverse, mean, count = ctx.saved_tensors
        affine, learned = weight is not None, ctx.share is None
        if dy.stride() != x.stride():
            last = _last(x) and not x.is_contiguous()
            dy = dy.contiguous(memory_format=FORMATS[x.ndim] if last and x.ndim == 4 else torch.contiguous_format)
        if channel_rows.can_run(x) and channel_rows.rows_of(dy) is not None:
            sum_dy, sum_dy_centred, d_weight = channel_rows.products(dy, x, mean, inverse)
            d_bias = sum_dy
        else:
            sum_dy, sum_dy_centred, d_weight, d_bias = torch.batch_norm_backward_reduce(
                dy, x, mean, inverse, weight, True, affine, ctx.has_bias
            )
        d_alpha = torch.empty_like(alpha) if learned else None
        rest_dy, rest_dy_centred = torch.empty_like(sum_dy), torch.empty_like(sum_dy)
        channels = x.shape[1]
        _kernels().hybrid_backward[(-(-channels // CHANNELS),)](
            alpha,
            0.0 if learned else ctx.share,
            batch_mean,
            batch_var,
            global_mean,
            global_var,
            inverse,
            weight if affine else inverse,
            sum_dy,
            sum_dy_centred,
            d_alpha if learned else rest_dy,
            rest_dy,
            rest_dy_centred,
            channels,
            LEARNED=learned,
            AFFINE=affine,
            BLOCK=CHANNELS,
        )
        dx = torch.batch_norm_backward_elemt(dy, x, batch_mean, inverse, weight, rest_dy, rest_dy_centred, count)
        affine_grads = d_weight if affine else None, d_bias if ctx.has_bias else None
        return dx, d_alpha, None, None, None, *affine_grads, None, None
