"""FedWon's standardisation of one weight as one kernel each way, where PyTorch takes a dozen of a few microseconds."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedkeel.nn.kernels import triton_kernels, usable
from fedkeel.nn.kernels.norms import FORMATS

MOST_FAN_IN = 2**16  # of an output channel, which one program holds in registers


def can_standardise(weight: Tensor, gain: Tensor) -> bool:
    if not usable("standardise", weight, gain):
        return False
    fan_in = weight[0].numel() if len(weight) else 0
    return 1 < fan_in <= MOST_FAN_IN and (weight.is_contiguous() or _channels_last(weight))


def standardise(weight: Tensor, gain: Tensor, eps: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """gain (W - mean) rsqrt(max(var N, eps)) over the fan-in N of each output channel, in the given type."""
    out: Tensor = _Standardise.apply(weight, gain, eps, dtype)  # type: ignore[no-untyped-call]
    return out


class _Standardise(torch.autograd.Function):
    """With d = W - mean, s the scale, T = sum(dy d) over the N weights of a channel: d gain = s T, and
    dW = gain s (dy - mean(dy) - d T s^2 N / (N - 1)), without the last term where the floor holds s."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gain: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        rows, fan_in = len(weight), weight[0].numel()
        out, moments = torch.empty_like(weight, dtype=dtype), weight.new_empty(3, rows)
        kernel = triton_kernels("triton_weights").standardise_forward
        kernel[(rows,)](weight, gain, out, moments, rows, fan_in, eps, **_sizes(fan_in))
        ctx.save_for_backward(weight, gain, moments)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        weight, gain, moments = ctx.saved_tensors
        if not (weight.is_contiguous() and dy.is_contiguous()) and not (_channels_last(weight) and _channels_last(dy)):
            dy = torch.empty_like(weight, dtype=dy.dtype).copy_(dy)
        rows, fan_in = len(weight), weight[0].numel()
        d_weight, d_gain = torch.empty_like(weight), torch.empty_like(gain)
        kernel = triton_kernels("triton_weights").standardise_backward
        kernel[(rows,)](dy, weight, gain, moments, d_weight, d_gain, rows, fan_in, **_sizes(fan_in))
        return d_weight, d_gain, None, None


def _channels_last(tensor: Tensor) -> bool:
    return tensor.ndim in FORMATS and tensor.is_contiguous(memory_format=FORMATS[tensor.ndim])


def _sizes(fan_in: int) -> dict[str, int]:
    block = max(32, 1 << (fan_in - 1).bit_length())
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 256))}
