"""Batch norm's passes over an activation whose channels lie last in memory, as few GPU kernels.

Used where PyTorch's own batch norm does not do what a method needs: two halves of a batch with statistics of their own
(`paired_batch_norm`), or moments that are mixed before they are used (`hybrid_batch_norm`). The activation is a matrix
of rows (samples and places) by channels; `rows_of` says whether a tensor is laid out so.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
TILE = 2048  # values that one program holds at a time
MOST_SPLITS = 512  # partial sums of a column
PROGRAMS = 528  # of a reduction: four for each multiprocessor of a large GPU
COLUMNS_COMBINED = 8
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def rows_of(x: Tensor) -> int | None:
    """The number of rows of a tensor whose channels lie last in memory; None for any other."""
    dense = x.ndim in (2, *FORMATS) and x.is_contiguous(memory_format=_layout(x))
    return x.numel() // x.shape[1] if dense and x.numel() else None


def can_run(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels take this activation, with the channel tensors (float32, on the same GPU) given."""
    if x.dtype not in TYPES or rows_of(x) is None:
        return False
    return all(o is None or (o.dtype == torch.float32 and o.device == x.device and o.is_contiguous()) for o in others)


def _layout(x: Tensor) -> torch.memory_format:
    return FORMATS.get(x.ndim, torch.contiguous_format)


@functools.cache
def kernels() -> Any:
    from fedkeel.nn.kernels import moments as _norm_kernels

    return _norm_kernels


class Tiling(NamedTuple):
    """How `rows` by `channels` values are cut into tiles, and its rows into splits."""

    rows: int
    channels: int
    tile_rows: int
    tile_columns: int
    splits: int
    per_split: int

    @property
    def blocks(self) -> int:
        """Of columns."""
        return -(-self.channels // self.tile_columns)

    @property
    def combined(self) -> tuple[int]:
        return (-(-self.channels // COLUMNS_COMBINED),)

    @property
    def tiles(self) -> tuple[int, int]:
        return -(-self.rows // self.tile_rows), self.blocks

    @property
    def shape(self) -> dict[str, int]:
        return {"ROWS": self.tile_rows, "COLUMNS": self.tile_columns}

    @property
    def combination(self) -> dict[str, int]:
        return {"SPLITS": max(16, 1 << (self.splits - 1).bit_length()), "COLUMNS": COLUMNS_COMBINED}


@functools.lru_cache(maxsize=512)
def tiling(rows: int, channels: int) -> Tiling:
    columns = min(32, max(16, 1 << (channels - 1).bit_length()))
    tile_rows = TILE // columns
    tiles = -(-rows // tile_rows)
    splits = min(tiles, MOST_SPLITS, max(1, PROGRAMS // -(-channels // columns)))
    per_split = -(-tiles // splits) * tile_rows
    return Tiling(rows, channels, tile_rows, columns, -(-rows // per_split), per_split)


def _partial_moments(x: Tensor, cut: Tiling) -> Tensor:
    partial = torch.empty(2, cut.splits, cut.channels, device=x.device, dtype=torch.float32)
    kernels().partial_moments[(cut.blocks, cut.splits)](x, partial, cut.rows, cut.channels, cut.per_split, **cut.shape)
    return partial


# -- one activation --------------------------------------------------------------------------------------------------
def moments(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / sqrt(biased variance + eps) of each channel, as `torch.batch_norm_stats`."""
    cut = tiling(x.numel() // x.shape[1], x.shape[1])
    partial = _partial_moments(x, cut)
    mean, inverse = torch.empty(2, cut.channels, device=x.device, dtype=torch.float32)
    kernels().combine_moments[cut.combined](
        partial, mean, inverse, cut.splits, cut.per_split, cut.rows, cut.channels, eps, **cut.combination
    )
    return mean, inverse


def products(dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each channel the sums of dy and of dy (x - mean), and the latter times `inverse`: as
    `torch.batch_norm_backward_reduce`."""
    cut = tiling(x.numel() // x.shape[1], x.shape[1])
    partial = torch.empty(2, cut.splits, cut.channels, device=x.device, dtype=torch.float32)
    kernels().partial_products[(cut.blocks, cut.splits)](
        dy, x, mean, mean, mean, partial, cut.rows, cut.channels, cut.per_split,
        PAIRED=False, DOUBLED=False, AFFINE=False, RELU=False, **cut.shape,
    )  # fmt: skip
    sum_dy, sum_dy_centred = sums = torch.empty(2, cut.channels, device=x.device, dtype=torch.float32)
    d_weight = torch.empty_like(mean)
    kernels().combine_products[cut.combined](
        partial, sums, inverse, d_weight, cut.splits, cut.channels, **cut.combination
    )
    return sum_dy, sum_dy_centred, d_weight


# -- a pair ----------------------------------------------------------------------------------------------------------
def paired_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: tuple[Tensor, Tensor, Tensor | None],
    given: tuple[Tensor, Tensor],
    momentum: float,
    eps: float,
    doubled: bool,
    relu: bool = False,
) -> tuple[Tensor, Tensor]:
    """[x1 with its own moments; x2 with the given ones], where x is [x1; x2] if `doubled` and else both.

    `running`: mean, variance and number of batches, updated from x1. With `relu`, the ReLU of it all. Also returns what
    `paired_backward` needs.
    """
    channels = x.shape[1]
    cut = tiling(x.numel() // channels // (2 if doubled else 1), channels)
    samples = len(x) if doubled else 2 * len(x)
    y = torch.empty((samples, *x.shape[1:]), dtype=x.dtype, device=x.device, memory_format=_layout(x))
    saved = torch.empty(4, channels, device=x.device, dtype=torch.float32)
    partial = _partial_moments(x, cut)
    batches = running[2]
    kernels().combine_paired_moments[cut.combined](
        partial,
        saved,
        *given,
        *running[:2],
        saved if batches is None else batches,
        cut.splits,
        cut.per_split,
        cut.rows,
        channels,
        momentum,
        eps,
        COUNT=batches is not None,
        **cut.combination,
    )
    kernels().paired_normalise[cut.tiles](
        x, y, saved, saved if weight is None else weight, saved if bias is None else bias, cut.rows, channels,
        DOUBLED=doubled, AFFINE=weight is not None, RELU=relu, **cut.shape,
    )  # fmt: skip
    return y, saved


def paired_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    saved: Tensor,
    doubled: bool,
    relu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    channels = x.shape[1]
    if rows_of(dy) is None:
        dy = dy.contiguous(memory_format=_layout(x))
    cut = tiling(x.numel() // channels // (2 if doubled else 1), channels)
    affine = (saved if weight is None else weight), (saved if bias is None else bias)
    kind = {"DOUBLED": doubled, "AFFINE": weight is not None, "RELU": relu}
    partial = torch.empty(4, cut.splits, channels, device=x.device, dtype=torch.float32)
    kernels().partial_products[(cut.blocks, cut.splits)](
        dy, x, saved, *affine, partial, cut.rows, channels, cut.per_split, PAIRED=True, **kind, **cut.shape
    )
    slopes, d_affine = (torch.empty(2, channels, device=x.device, dtype=torch.float32) for _ in range(2))
    kernels().combine_paired_products[cut.combined](
        partial, saved, slopes, d_affine, cut.splits, cut.rows, channels, **cut.combination
    )
    dx = torch.empty_like(x)
    kernels().paired_backward[cut.tiles](dy, x, dx, saved, slopes, *affine, cut.rows, channels, **kind, **cut.shape)
    return dx, d_affine[0], d_affine[1]
