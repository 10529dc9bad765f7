"""Batch norm's passes over an activation whose channels lie last in memory, as few GPU kernels.

For what PyTorch's own batch norm does not do: two halves of a batch with statistics of their own (GReg), and moments
that are mixed before they are used (HBN). The activation is a matrix of rows (samples and places) by channels.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedkeel.core.state import BatchNorm
from fedkeel.nn.kernels import triton_kernels, usable

if TYPE_CHECKING:
    from fedkeel.nn.hybrid_batch_norm import HybridBatchNorm

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
TYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 2048  # values that one program holds at a time
MOST_SPLITS = 512  # partial sums of a column
PROGRAMS = 528  # of a reduction: four for each multiprocessor of a large GPU
COLUMNS_COMBINED = 8


def is_rows(x: Tensor) -> bool:
    """Whether a tensor's channels lie last in memory."""
    return x.ndim in (2, *FORMATS) and x.numel() > 0 and x.is_contiguous(memory_format=_layout(x))


def takes(name: str, x: Tensor, *others: Tensor | None) -> bool:
    """Whether this kernel takes the activation, with tensors of one float32 number a channel, the first not None."""
    first, *rest = others
    assert first is not None
    if not usable(name, first, *rest) or x.device != first.device or x.dtype not in TYPES:
        return False
    return is_rows(x) and all(other is None or other.is_contiguous() for other in others)


def _layout(x: Tensor) -> torch.memory_format:
    return FORMATS.get(x.ndim, torch.contiguous_format)


class Tiling(NamedTuple):
    """How `rows` by `channels` values are cut into tiles, and the rows into splits, each with sums of its own.

    The grids over all tiles, over the splits of a reduction, and over what combines these; and the sizes that the
    first two and the last are compiled for.
    """

    rows: int
    channels: int
    splits: int
    per_split: int
    tiles: tuple[int, int]
    reduction: tuple[int, int]
    combination: tuple[int]
    tile: dict[str, int]
    combined: dict[str, int]


@functools.lru_cache(maxsize=512)
def tiling(rows: int, channels: int) -> Tiling:
    columns = min(32, max(16, 1 << (channels - 1).bit_length()))
    tile_rows = TILE // columns
    down, across = -(-rows // tile_rows), -(-channels // columns)
    per_split = -(-down // min(down, MOST_SPLITS, max(1, PROGRAMS // across))) * tile_rows
    splits = -(-rows // per_split)
    tile = {"ROWS": tile_rows, "COLUMNS": columns}
    combined = {"SPLITS": max(16, 1 << (splits - 1).bit_length()), "COLUMNS": COLUMNS_COMBINED}
    combination = (-(-channels // COLUMNS_COMBINED),)
    return Tiling(rows, channels, splits, per_split, (down, across), (across, splits), combination, tile, combined)


def _kernels() -> Any:
    return triton_kernels("triton_norms")


def _channels(x: Tensor, *numbers: int) -> Tensor:
    """Memory for so many float32 numbers of each channel."""
    return torch.empty(*numbers, x.shape[1], device=x.device, dtype=torch.float32)


def _partial_moments(x: Tensor, cut: Tiling) -> Tensor:
    partial = _channels(x, 2, cut.splits)
    _kernels().partial_moments[cut.reduction](x, partial, cut.rows, cut.channels, cut.per_split, **cut.tile)
    return partial


def _laid_out_as(x: Tensor, dy: Tensor) -> Tensor:
    return dy if is_rows(dy) else dy.contiguous(memory_format=_layout(x))


# -- GReg's pair -------------------------------------------------------------------------------------------------------
def paired(x: Tensor, norm: BatchNorm, given: tuple[Tensor, Tensor], doubled: bool) -> Tensor:
    """[x1 with its own moments; x2 with the given ones], where x is [x1; x2] if `doubled` and else both.

    The norm's running statistics are updated from x1.
    """
    y: Tensor = _Paired.apply(x, norm.weight, norm.bias, norm, given, doubled)  # type: ignore[no-untyped-call]
    return y


class _Paired(torch.autograd.Function):
    """Three kernels each way: values are read and written as seldom as can be."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        norm: BatchNorm,
        given: tuple[Tensor, Tensor],
        doubled: bool,
    ) -> Tensor:
        halves = 2 if doubled else 1
        cut = tiling(x.numel() // x.shape[1] // halves, x.shape[1])
        shape = (2 * len(x) // halves, *x.shape[1:])
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_layout(x))
        saved = _channels(x, 4)
        batches = norm.num_batches_tracked
        _kernels().combine_paired_moments[cut.combination](
            _partial_moments(x, cut), saved, *given, norm.running_mean, norm.running_var,
            saved if batches is None else batches,
            cut.splits, cut.per_split, cut.rows, cut.channels, norm.momentum, norm.eps,
            COUNT=batches is not None, **cut.combined,
        )  # fmt: skip
        kind = {"DOUBLED": doubled, "AFFINE": weight is not None}
        affine = (saved, saved) if weight is None else (weight, bias)
        _kernels().paired_normalise[cut.tiles](x, y, saved, *affine, cut.rows, cut.channels, **kind, **cut.tile)
        ctx.save_for_backward(x, weight, saved)
        ctx.cut, ctx.kind = cut, kind
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, saved = ctx.saved_tensors
        cut, kind, dy = ctx.cut, ctx.kind, _laid_out_as(x, dy)
        partial, slopes, d_affine = _channels(x, 4, cut.splits), _channels(x, 2), _channels(x, 2)
        _kernels().partial_products[cut.reduction](
            dy, x, saved, partial, cut.rows, cut.channels, cut.per_split,
            PAIRED=True, DOUBLED=kind["DOUBLED"], **cut.tile,
        )  # fmt: skip
        _kernels().combine_paired_products[cut.combination](
            partial, saved, slopes, d_affine, cut.splits, cut.rows, cut.channels, **cut.combined
        )
        dx = torch.empty_like(x)
        _kernels().paired_backward[cut.tiles](
            dy, x, dx, saved, slopes, saved if weight is None else weight, cut.rows, cut.channels, **kind, **cut.tile
        )
        return dx, *((None, None) if weight is None else d_affine), None, None, None


# -- hybrid batch normalisation ----------------------------------------------------------------------------------------
def hybrid(x: Tensor, layer: HybridBatchNorm) -> Tensor:
    """HBN's training forward; `nn.hybrid_batch_norm` has the equations. One kernel each way does all that is per
    channel, sigmoid and recording included; the last pass over the activation is that of synchronised batch norm."""
    if not torch.is_grad_enabled():  # a statistics pass: the host would be the slower side of it
        saved, _ = _mixed_moments(x, layer)
        return torch.batch_norm_elemt(x, layer.weight, layer.bias, saved[2], saved[3], layer.eps)
    y: Tensor = _Hybrid.apply(x, layer.alpha, layer.weight, layer.bias, layer)  # type: ignore[no-untyped-call]
    return y


def _mixed_moments(x: Tensor, layer: HybridBatchNorm) -> tuple[Tensor, Tensor]:
    """(4, channels): mean and variance of the batch, mean and inverse deviation of Eq. 9; and the rows, as a tensor."""
    cut = tiling(x.numel() // x.shape[1], x.shape[1])
    saved, count = _channels(x, 4), torch.empty(1, dtype=torch.int32, device=x.device)
    samples, mean, var = count, saved, saved  # not looked at
    if layer.record:
        samples, mean, var = layer._count.add_(len(x)), layer._mean, layer._var
    _kernels().combine_hybrid_moments[cut.combination](
        _partial_moments(x, cut), saved, count, layer.alpha, layer.constant or 0.0,
        layer.running_mean, layer.running_var, samples, mean, var,
        cut.splits, cut.per_split, cut.rows, cut.channels, len(x), layer.recording_momentum or 0.0, layer.eps,
        LEARNED=layer.constant is None, RECORD={None: 0, "batch": 1, "mixture": 2}[layer.record],
        MOVING=layer.recording_momentum is not None, **cut.combined,
    )  # fmt: skip
    return saved, count


class _Hybrid(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, alpha: Tensor, weight: Tensor | None, bias: Tensor | None, layer: HybridBatchNorm
    ) -> Tensor:
        saved, count = _mixed_moments(x, layer)
        ctx.save_for_backward(x, alpha, weight, layer.running_mean, layer.running_var, saved, count)
        ctx.share, ctx.has_bias = layer.constant, bias is not None
        return torch.batch_norm_elemt(x, weight, bias, saved[2], saved[3], layer.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, alpha, weight, global_mean, global_var, saved, count = ctx.saved_tensors
        batch_mean, _, mean, inverse = saved
        cut, dy = tiling(x.numel() // x.shape[1], x.shape[1]), _laid_out_as(x, dy)
        partial, gradients = _channels(x, 2, cut.splits), _channels(x, 5)
        _kernels().partial_products[cut.reduction](
            dy, x, mean, partial, cut.rows, cut.channels, cut.per_split,
            PAIRED=False, DOUBLED=False, **cut.tile,
        )  # fmt: skip
        _kernels().combine_hybrid_products[cut.combination](
            partial, saved, alpha, ctx.share or 0.0, global_mean, global_var, saved if weight is None else weight,
            gradients, cut.splits, cut.channels,
            LEARNED=ctx.share is None, AFFINE=weight is not None, **cut.combined,
        )  # fmt: skip
        d_alpha, d_weight, d_bias, rest_dy, rest_dy_centred = gradients
        # With the batch's mean and what the mixture leaves of the sums, synchronised batch norm's gradient is dx.
        dx = torch.batch_norm_backward_elemt(dy, x, batch_mean, inverse, weight, rest_dy, rest_dy_centred, count)
        affine = d_weight if weight is not None else None, d_bias if ctx.has_bias else None
        return dx, d_alpha if ctx.share is None else None, *affine, None
