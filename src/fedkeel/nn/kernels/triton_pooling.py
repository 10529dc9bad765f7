# mypy: ignore-errors
"""The Triton kernels of `nn.kernels.pooling`. Imported only where Triton is."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["places"])
def max_pool_forward(
    x, y, choice, places, channels, height, width, out_height, out_width,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`choice` says which value of its window each output is, as one byte."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (place[:, None] < places) & (column[None, :] < channels)
    sample, rest = place // (out_height * out_width), place % (out_height * out_width)
    top, left = rest // out_width * STRIDE - PADDING, rest % out_width * STRIDE - PADDING
    best = tl.full([ROWS, COLUMNS], float("-inf"), dtype=tl.float32)
    which = tl.zeros([ROWS, COLUMNS], dtype=tl.int8)
    for k in tl.static_range(KERNEL * KERNEL):
        h, w = top + k // KERNEL, left + k % KERNEL
        there = (h >= 0) & (h < height) & (w >= 0) & (w < width)
        at = ((sample * height + h) * width + w).to(tl.int64)[:, None] * channels + column[None, :]
        value = tl.load(x + at, mask=inside & there[:, None], other=float("-inf")).to(tl.float32)
        better = (value > best) | (value != value)
        best = tl.where(better, value, best)
        which = tl.where(better, k, which).to(tl.int8)
    at = place[:, None].to(tl.int64) * channels + column[None, :]
    tl.store(y + at, best, mask=inside)
    tl.store(choice + at, which, mask=inside)


@triton.jit(do_not_specialize=["places"])
def max_pool_backward(
    dy, choice, dx, places, channels, height, width, out_height, out_width,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, PADDING: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each input gathers from the windows that have chosen it: the sum has one order."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (place[:, None] < places) & (column[None, :] < channels)
    sample, rest = place // (height * width), place % (height * width)
    h, w = rest // width + PADDING, rest % width + PADDING
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for k in tl.static_range(KERNEL * KERNEL):
        down, across = h - k // KERNEL, w - k % KERNEL
        top, left = down // STRIDE, across // STRIDE
        there = (down >= 0) & (across >= 0) & (down % STRIDE == 0) & (across % STRIDE == 0)
        there = there & (top < out_height) & (left < out_width)
        at = ((sample * out_height + top) * out_width + left).to(tl.int64)[:, None] * channels + column[None, :]
        mask = inside & there[:, None]
        which = tl.load(choice + at, mask=mask, other=-1)
        gradient = tl.load(dy + at, mask=mask, other=0.0).to(tl.float32)
        total += tl.where(which == k, gradient, 0.0)
    tl.store(dx + place[:, None].to(tl.int64) * channels + column[None, :], total, mask=inside)
