# mypy: ignore-errors
"""The Triton kernels of `fedkeel.nn.kernels.fused`. Imported only where Triton is."""

import triton
import triton.language as tl


@triton.jit
def standardise_forward(weight, gain, out, moments, rows, fan_in, eps, BLOCK: tl.constexpr):  # noqa: N803
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
def standardise_backward(d_out, weight, gain, moments, d_weight, d_gain, rows, fan_in, BLOCK: tl.constexpr):  # noqa: N803
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


@triton.jit
def _lerp(start, end, weight):
    """As torch.lerp: exact at both ends."""
    return tl.where(weight < 0.5, start + weight * (end - start), end - (end - start) * (1.0 - weight))


@triton.jit(do_not_specialize=["elements", "samples"])
def hybrid_forward(
    alpha,
    constant,
    batch_mean,
    batch_inverse,
    global_mean,
    global_var,
    mean,
    inverse,
    batch_var,
    count,
    recorded_count,
    recorded_mean,
    recorded_var,
    channels,
    elements,
    samples,
    momentum,
    eps,
    LEARNED: tl.constexpr,  # noqa: N803
    RECORD: tl.constexpr,  # noqa: N803
    MOVING: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Eq. 9 for a block of channels. RECORD: 0 nothing, 1 the batch's moments, 2 those of the mixture."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    mb = tl.load(batch_mean + c, mask=inside, other=0.0)
    rb = tl.load(batch_inverse + c, mask=inside, other=1.0)
    mg = tl.load(global_mean + c, mask=inside, other=0.0)
    vg = tl.load(global_var + c, mask=inside, other=1.0)
    vb = tl.maximum(1.0 / (rb * rb) - eps, 0.0)
    if LEARNED:
        share = tl.sigmoid(tl.load(alpha + c, mask=inside, other=0.0))
    else:
        share = tl.zeros([BLOCK], dtype=tl.float32) + constant
    m = _lerp(mb, mg, share)
    v = _lerp(vb, vg, share)
    tl.store(mean + c, m, mask=inside)
    tl.store(inverse + c, 1.0 / tl.sqrt(v + eps), mask=inside)
    tl.store(batch_var + c, vb, mask=inside)
    if tl.program_id(0) == 0:
        tl.store(count, elements)
    if RECORD:
        new_mean = m if RECORD == 2 else mb
        new_var = v if RECORD == 2 else vb
        old_mean = tl.load(recorded_mean + c, mask=inside, other=0.0)
        old_var = tl.load(recorded_var + c, mask=inside, other=0.0)
        if MOVING:
            tl.store(recorded_mean + c, _lerp(old_mean, new_mean, momentum), mask=inside)
            tl.store(recorded_var + c, _lerp(old_var, new_var, momentum), mask=inside)
        else:
            part = samples.to(tl.float32) / tl.load(recorded_count).to(tl.float32)
            delta = new_mean - old_mean
            pooled = _lerp(old_var, new_var, part) + part * (1.0 - part) * delta * delta
            tl.store(recorded_var + c, pooled, mask=inside)
            tl.store(recorded_mean + c, old_mean + part * delta, mask=inside)


@triton.jit
def hybrid_backward(
    alpha,
    constant,
    batch_mean,
    batch_var,
    global_mean,
    global_var,
    inverse,
    weight,
    sum_dy,
    sum_dy_centred,
    d_alpha,
    rest_dy,
    rest_dy_centred,
    channels,
    LEARNED: tl.constexpr,  # noqa: N803
    AFFINE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    s = tl.load(sum_dy + c, mask=inside, other=0.0)
    t = tl.load(sum_dy_centred + c, mask=inside, other=0.0)
    if LEARNED:
        share = tl.sigmoid(tl.load(alpha + c, mask=inside, other=0.0))
        r = tl.load(inverse + c, mask=inside, other=1.0)
        scale = r
        if AFFINE:
            scale = r * tl.load(weight + c, mask=inside, other=1.0)
        apart = tl.load(global_mean + c, mask=inside, other=0.0) - tl.load(batch_mean + c, mask=inside, other=0.0)
        wider = tl.load(global_var + c, mask=inside, other=0.0) - tl.load(batch_var + c, mask=inside, other=0.0)
        d_share = -scale * s * apart - 0.5 * scale * r * r * t * wider
        tl.store(d_alpha + c, d_share * share * (1.0 - share), mask=inside)
    else:
        share = tl.zeros([BLOCK], dtype=tl.float32) + constant
    tl.store(rest_dy + c, (1.0 - share) * s, mask=inside)
    tl.store(rest_dy_centred + c, (1.0 - share) * t, mask=inside)
