# mypy: ignore-errors
"""The Triton kernels of HBN in `nn.kernels.norms`: all that is per channel. Imported only where Triton is."""

import triton
import triton.language as tl

from fedkeel.nn.kernels.triton_norms import combined_moments, total_of


@triton.jit
def _lerp(start, end, weight):
    """As torch.lerp: exact at both ends."""
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight))


@triton.jit(do_not_specialize=["splits", "rows", "per_split", "samples"])
def combine_hybrid_moments(
    partial,
    saved,
    count,
    alpha,
    constant,
    global_mean,
    global_var,
    recorded_count,
    recorded_mean,
    recorded_var,
    splits,
    per_split,
    rows,
    channels,
    samples,
    momentum,
    eps,
    LEARNED: tl.constexpr,
    RECORD: tl.constexpr,
    MOVING: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`saved` (4, channels): mean and variance of the batch, mean and inverse deviation of HBN's Eq. 9.

    RECORD: 0 nothing, 1 the batch's moments, 2 those of the mixture."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    batch_mean, batch_var = combined_moments(partial, splits, per_split, rows, channels, column, SPLITS)
    if LEARNED:
        share = tl.sigmoid(tl.load(alpha + column, mask=inside, other=0.0))
    else:
        share = tl.zeros([COLUMNS], dtype=tl.float32) + constant
    mean = _lerp(batch_mean, tl.load(global_mean + column, mask=inside, other=0.0), share)
    var = _lerp(batch_var, tl.load(global_var + column, mask=inside, other=1.0), share)
    tl.store(saved + column, batch_mean, mask=inside)
    tl.store(saved + channels + column, batch_var, mask=inside)
    tl.store(saved + 2 * channels + column, mean, mask=inside)
    tl.store(saved + 3 * channels + column, 1.0 / tl.sqrt(var + eps), mask=inside)
    if tl.program_id(0) == 0:
        tl.store(count, rows)
    if RECORD:
        new_mean = mean if RECORD == 2 else batch_mean
        new_var = var if RECORD == 2 else batch_var
        old_mean = tl.load(recorded_mean + column, mask=inside, other=0.0)
        old_var = tl.load(recorded_var + column, mask=inside, other=0.0)
        if MOVING:
            tl.store(recorded_mean + column, _lerp(old_mean, new_mean, momentum), mask=inside)
            tl.store(recorded_var + column, _lerp(old_var, new_var, momentum), mask=inside)
        else:
            part = samples.to(tl.float32) / tl.load(recorded_count).to(tl.float32)
            delta = new_mean - old_mean
            pooled = _lerp(old_var, new_var, part) + part * (1.0 - part) * delta * delta
            tl.store(recorded_var + column, pooled, mask=inside)
            tl.store(recorded_mean + column, old_mean + part * delta, mask=inside)


@triton.jit(do_not_specialize=["splits"])
def combine_hybrid_products(
    partial,
    saved,
    alpha,
    constant,
    global_mean,
    global_var,
    weight,
    gradients,
    splits,
    channels,
    LEARNED: tl.constexpr,
    AFFINE: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`gradients` (5, channels): of alpha, weight and bias, then what the share of the batch leaves of the sums of dy
    and of dy (x - mean)."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    total = total_of(partial, splits, channels, column, SPLITS)
    product = total_of(partial + splits * channels, splits, channels, column, SPLITS)
    inverse = tl.load(saved + 3 * channels + column, mask=inside, other=1.0)
    if LEARNED:
        share = tl.sigmoid(tl.load(alpha + column, mask=inside, other=0.0))
        scale = inverse * tl.load(weight + column, mask=inside, other=1.0) if AFFINE else inverse
        batch_mean = tl.load(saved + column, mask=inside, other=0.0)
        batch_var = tl.load(saved + channels + column, mask=inside, other=0.0)
        apart = tl.load(global_mean + column, mask=inside, other=0.0) - batch_mean
        wider = tl.load(global_var + column, mask=inside, other=0.0) - batch_var
        d_share = -scale * total * apart - 0.5 * scale * inverse * inverse * product * wider
        tl.store(gradients + column, d_share * share * (1.0 - share), mask=inside)
    else:
        share = tl.zeros([COLUMNS], dtype=tl.float32) + constant
    tl.store(gradients + channels + column, product * inverse, mask=inside)
    tl.store(gradients + 2 * channels + column, total, mask=inside)
    tl.store(gradients + 3 * channels + column, (1.0 - share) * total, mask=inside)
    tl.store(gradients + 4 * channels + column, (1.0 - share) * product, mask=inside)
