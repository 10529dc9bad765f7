# mypy: ignore-errors
"""The Triton kernels of `nn.kernels.norms`. Imported only where Triton is.

An activation is a matrix here: a row for each sample and place, a column for each channel. Sums over the rows are made
in two steps, `splits` partial ones and then their combination, in a fixed order: so they are the same every time.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "per_split"])
def partial_moments(x, partial, rows, channels, per_split, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Mean and sum of squared deviations of each split of the rows: `partial` is (2, splits, channels)."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split, splits = tl.program_id(1), tl.num_programs(1)
    first = split * per_split
    last = tl.minimum(first + per_split, rows)
    known = column < channels
    # Deviations from the first row: sums of squares of what may lie far from zero would lose their digits.
    origin = tl.load(x + first.to(tl.int64) * channels + column, mask=known, other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    squares = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < last) & known[None, :]
        values = tl.load(x + row[:, None].to(tl.int64) * channels + column[None, :], mask=inside, other=0.0)
        apart = tl.where(inside, values.to(tl.float32) - origin[None, :], 0.0)
        sums += apart
        squares += apart * apart
    count = (last - first).to(tl.float32)
    shift = tl.sum(sums, axis=0) / count
    spread = tl.maximum(tl.sum(squares, axis=0) - shift * shift * count, 0.0)
    place = split * channels + column
    tl.store(partial + place, origin + shift, mask=known)
    tl.store(partial + splits * channels + place, spread, mask=known)


@triton.jit
def _combined(partial, splits, per_split, rows, channels, column, SPLITS: tl.constexpr):
    """Mean and biased variance over all rows from those of the splits."""
    split = tl.arange(0, SPLITS)
    inside = (split[:, None] < splits) & (column[None, :] < channels)
    place = split[:, None] * channels + column[None, :]
    means = tl.load(partial + place, mask=inside, other=0.0)
    squares = tl.load(partial + splits * channels + place, mask=inside, other=0.0)
    counts = tl.minimum(rows - split * per_split, per_split)
    counts = tl.where(split < splits, counts, 0).to(tl.float32)[:, None]
    mean = tl.sum(means * counts, axis=0) / rows
    apart = means - mean[None, :]
    return mean, (tl.sum(squares, axis=0) + tl.sum(apart * apart * counts, axis=0)) / rows


@triton.jit(do_not_specialize=["splits", "rows", "per_split"])
def combine_paired_moments(
    partial, saved, given_mean, given_var, running_mean, running_var, batches,
    splits, per_split, rows, channels, momentum, eps,
    COUNT: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`saved` (4, channels): mean and inverse deviation of the batch, then of the given statistics. Updates the running
    statistics as batch norm does, with the unbiased variance, and counts the batch."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    mean, var = _combined(partial, splits, per_split, rows, channels, column, SPLITS)
    other = tl.load(given_mean + column, mask=inside, other=0.0)
    other_var = tl.load(given_var + column, mask=inside, other=1.0)
    old_mean = tl.load(running_mean + column, mask=inside, other=0.0)
    old_var = tl.load(running_var + column, mask=inside, other=0.0)
    unbiased = var * (rows / (rows - 1.0))
    tl.store(saved + column, mean, mask=inside)
    tl.store(saved + channels + column, 1.0 / tl.sqrt(var + eps), mask=inside)
    tl.store(saved + 2 * channels + column, other, mask=inside)
    tl.store(saved + 3 * channels + column, 1.0 / tl.sqrt(other_var + eps), mask=inside)
    tl.store(running_mean + column, (1.0 - momentum) * old_mean + momentum * mean, mask=inside)
    tl.store(running_var + column, (1.0 - momentum) * old_var + momentum * unbiased, mask=inside)
    if COUNT:  # noqa: SIM102  (decided by the compiler, the other by the program)
        if tl.program_id(0) == 0:
            tl.store(batches, tl.load(batches) + 1)


@triton.jit(do_not_specialize=["rows"])
def paired_normalise(
    x, y, saved, weight, bias,
    rows, channels,
    DOUBLED: tl.constexpr, AFFINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`y` has 2 x rows; `x` as many if DOUBLED, else `rows`, which both halves are made of."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < channels
    inside = (row[:, None] < rows) & known[None, :]
    place = row[:, None].to(tl.int64) * channels + column[None, :]
    half = rows.to(tl.int64) * channels
    w = tl.load(weight + column, mask=known, other=1.0) if AFFINE else 1.0
    b = tl.load(bias + column, mask=known, other=0.0) if AFFINE else 0.0
    one_mean = tl.load(saved + column, mask=known, other=0.0)
    one_scale = tl.load(saved + channels + column, mask=known, other=1.0) * w
    two_mean = tl.load(saved + 2 * channels + column, mask=known, other=0.0)
    two_scale = tl.load(saved + 3 * channels + column, mask=known, other=1.0) * w
    shift = tl.zeros([COLUMNS], dtype=tl.float32) + b
    one = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    two = one
    if DOUBLED:
        two = tl.load(x + half + place, mask=inside, other=0.0).to(tl.float32)
    one = (one - one_mean[None, :]) * one_scale[None, :] + shift[None, :]
    two = (two - two_mean[None, :]) * two_scale[None, :] + shift[None, :]
    tl.store(y + place, one, mask=inside)
    tl.store(y + half + place, two, mask=inside)


@triton.jit(do_not_specialize=["rows", "per_split"])
def partial_products(
    dy, x, saved, partial,
    rows, channels, per_split,
    PAIRED: tl.constexpr, DOUBLED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of dy and of dy (x - mean) of each split; if PAIRED, also those of the second half with its own mean.

    `partial` is (2 or 4, splits, channels), `saved` as `combine_paired_moments` makes it, or just the mean."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < channels
    split, splits = tl.program_id(1), tl.num_programs(1)
    first = split * per_split
    last = tl.minimum(first + per_split, rows)
    half = rows.to(tl.int64) * channels
    one_mean = tl.load(saved + column, mask=known, other=0.0)
    one_sum = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    one_product = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    if PAIRED:
        two_mean = tl.load(saved + 2 * channels + column, mask=known, other=0.0)
        two_sum = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        two_product = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row[:, None] < last) & known[None, :]
        place = row[:, None].to(tl.int64) * channels + column[None, :]
        d = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        centred = v - one_mean[None, :]
        one_sum += d
        one_product += d * centred
        if PAIRED:
            d = tl.load(dy + half + place, mask=inside, other=0.0).to(tl.float32)
            if DOUBLED:
                v = tl.load(x + half + place, mask=inside, other=0.0).to(tl.float32)
            centred = v - two_mean[None, :]
            two_sum += d
            two_product += d * centred
    place = split * channels + column
    size = splits * channels
    tl.store(partial + place, tl.sum(one_sum, axis=0), mask=known)
    tl.store(partial + size + place, tl.sum(one_product, axis=0), mask=known)
    if PAIRED:
        tl.store(partial + 2 * size + place, tl.sum(two_sum, axis=0), mask=known)
        tl.store(partial + 3 * size + place, tl.sum(two_product, axis=0), mask=known)


@triton.jit
def _total(partial, splits, channels, column, SPLITS: tl.constexpr):
    split = tl.arange(0, SPLITS)
    inside = (split[:, None] < splits) & (column[None, :] < channels)
    return tl.sum(tl.load(partial + split[:, None] * channels + column[None, :], mask=inside, other=0.0), axis=0)


@triton.jit(do_not_specialize=["splits", "rows"])
def combine_paired_products(
    partial, saved, slopes, d_affine, splits, rows, channels, SPLITS: tl.constexpr, COLUMNS: tl.constexpr
):
    """`slopes` (2, channels): what the batch's own moments take off dy in the first half, per unit and per (x - mean).
    `d_affine` (2, channels): the gradients of weight and bias, of both halves together."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    size = splits * channels
    one_sum = _total(partial, splits, channels, column, SPLITS)
    one_product = _total(partial + size, splits, channels, column, SPLITS)
    two_sum = _total(partial + 2 * size, splits, channels, column, SPLITS)
    two_product = _total(partial + 3 * size, splits, channels, column, SPLITS)
    one_inverse = tl.load(saved + channels + column, mask=inside, other=1.0)
    two_inverse = tl.load(saved + 3 * channels + column, mask=inside, other=1.0)
    tl.store(slopes + column, one_sum / rows, mask=inside)
    tl.store(slopes + channels + column, one_product * one_inverse * one_inverse / rows, mask=inside)
    tl.store(d_affine + column, one_product * one_inverse + two_product * two_inverse, mask=inside)
    tl.store(d_affine + channels + column, one_sum + two_sum, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def paired_backward(
    dy, x, dx, saved, slopes, weight,
    rows, channels,
    DOUBLED: tl.constexpr, AFFINE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx = weight / deviation (dy - mean(dy) - (x - mean) mean(dy (x - mean)) / var) in the first half, whose moments
    depend on x; weight / deviation dy in the second, whose do not. Where both are made of one x, the sum of the two."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < channels
    inside = (row[:, None] < rows) & known[None, :]
    place = row[:, None].to(tl.int64) * channels + column[None, :]
    half = rows.to(tl.int64) * channels
    w = tl.load(weight + column, mask=known, other=1.0) if AFFINE else 1.0
    mean = tl.load(saved + column, mask=known, other=0.0)
    one_scale = tl.load(saved + channels + column, mask=known, other=1.0) * w
    two_scale = tl.load(saved + 3 * channels + column, mask=known, other=1.0) * w
    level = tl.load(slopes + column, mask=known, other=0.0)
    slope = tl.load(slopes + channels + column, mask=known, other=0.0)
    one = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    two = tl.load(dy + half + place, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    centred = v - mean[None, :]
    one = (one - level[None, :] - centred * slope[None, :]) * one_scale[None, :]
    two = two * two_scale[None, :]
    if DOUBLED:
        tl.store(dx + place, one, mask=inside)
        tl.store(dx + half + place, two, mask=inside)
    else:
        tl.store(dx + place, one + two, mask=inside)


# -- hybrid batch normalisation ----------------------------------------------------------------------------------------
@triton.jit
def _lerp(start, end, weight):
    """As torch.lerp: exact at both ends."""
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight))


@triton.jit(do_not_specialize=["splits", "rows", "per_split", "samples"])
def combine_hybrid_moments(
    partial, saved, count, alpha, constant, global_mean, global_var, recorded_count, recorded_mean, recorded_var,
    splits, per_split, rows, channels, samples, momentum, eps,
    LEARNED: tl.constexpr, RECORD: tl.constexpr, MOVING: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`saved` (4, channels): mean and variance of the batch, mean and inverse deviation of HBN's Eq. 9.

    RECORD: 0 nothing, 1 the batch's moments, 2 those of the mixture."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    batch_mean, batch_var = _combined(partial, splits, per_split, rows, channels, column, SPLITS)
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
    partial, saved, alpha, constant, global_mean, global_var, weight, gradients,
    splits, channels,
    LEARNED: tl.constexpr, AFFINE: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`gradients` (5, channels): of alpha, weight and bias, then what the share of the batch leaves of the sums of dy
    and of dy (x - mean)."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < channels
    total = _total(partial, splits, channels, column, SPLITS)
    product = _total(partial + splits * channels, splits, channels, column, SPLITS)
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
