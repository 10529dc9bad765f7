# mypy: ignore-errors
"""The Triton kernels of `fedkeel.nn.kernels.weights`. Imported only where Triton is."""

import triton
import triton.language as tl


@triton.jit
def standardise_forward(weight, gain, out, moments, rows, fan_in, eps, BLOCK: tl.constexpr):
    """One program per output channel, whose weights lie side by side in memory in whatever order.

    `moments` (3, rows), for the gradient: mean, scale, and N scale^2 / (N - 1), or 0 where the floor holds the scale.
    """
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < fan_in
    n = fan_in.to(tl.float32)
    w = tl.load(weight + row * fan_in + columns, mask=inside, other=0.0)
    mean = tl.sum(w, axis=0) / n
    centred = tl.where(inside, w - mean, 0.0)
    spread = tl.sum(centred * centred, axis=0) / (n - 1.0) * n
    scale = 1.0 / tl.sqrt(tl.maximum(spread, eps))
    tl.store(out + row * fan_in + columns, centred * (scale * tl.load(gain + row)), mask=inside)
    tl.store(moments + row, mean)
    tl.store(moments + rows + row, scale)
    tl.store(moments + 2 * rows + row, tl.where(spread >= eps, n * scale * scale / (n - 1.0), 0.0))


@triton.jit
def standardise_backward(d_out, weight, gain, moments, d_weight, d_gain, rows, fan_in, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    inside = columns < fan_in
    dy = tl.load(d_out + row * fan_in + columns, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + row * fan_in + columns, mask=inside, other=0.0)
    mean = tl.load(moments + row)
    scale = tl.load(moments + rows + row)
    slope = tl.load(moments + 2 * rows + row)
    centred = tl.where(inside, w - mean, 0.0)
    mean_dy = tl.sum(dy, axis=0) / fan_in.to(tl.float32)
    product = tl.sum(dy * centred, axis=0)
    dw = scale * tl.load(gain + row) * (dy - mean_dy - slope * product * centred)
    tl.store(d_weight + row * fan_in + columns, dw, mask=inside)
    tl.store(d_gain + row, scale * product)
