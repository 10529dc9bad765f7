"""Max-pooling of a large activation whose channels lie last, as one GPU kernel each way.

At 224 px the pooling behind a ResNet's first layer takes PyTorch longer than any of its convolutions. The result is the
same, and so is the gradient, whose sums have a fixed order here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedkeel.nn.kernels import channel_rows, fused

ROWS, COLUMNS = 32, 64  # of a tile


class MaxPool2d(nn.MaxPool2d):
    """As `nn.MaxPool2d`, of square windows."""

    def forward(self, x: Tensor) -> Tensor:
        if self._on_rows(x):
            return pooled(x, self.kernel_size, self.stride, self.padding)
        y: Tensor = super().forward(x)
        return y

    def _on_rows(self, x: Tensor) -> bool:
        if (
            torch.compiler.is_compiling()
            or not x.is_cuda
            or x.ndim != 4
            or x.is_contiguous()
            or not channel_rows.can_run(x)
        ):
            return False
        square = all(isinstance(size, int) for size in (self.kernel_size, self.stride, self.padding))
        plain = square and self.dilation == 1 and not self.ceil_mode and not self.return_indices
        return plain and fused.runs_on(_probe(x.device))


@functools.lru_cache(maxsize=8)
def _probe(device: torch.device) -> Tensor:
    return torch.ones(1, device=device)


def pooled(x: Tensor, kernel: Any, stride: Any, padding: Any) -> Tensor:
    y: Tensor = _MaxPool.apply(x, kernel, stride, padding)  # type: ignore[no-untyped-call]
    return y


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
        samples, channels, height, width = x.shape
        out_height, out_width = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
        shape = samples, channels, out_height, out_width
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        chosen = torch.empty(shape, dtype=torch.int8, device=x.device, memory_format=torch.channels_last)
        window = {"KERNEL": kernel, "STRIDE": stride, "PADDING": padding}
        sizes = channels, height, width, out_height, out_width
        places = samples * out_height * out_width
        channel_rows.kernels().max_pool_forward[_grid(places, channels)](
            x, y, chosen, places, *sizes, **window, ROWS=ROWS, COLUMNS=COLUMNS
        )
        ctx.save_for_backward(chosen)
        ctx.shape, ctx.sizes, ctx.window = x.shape, sizes, window
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (chosen,) = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = torch.empty(ctx.shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
        samples, channels, height, width = ctx.shape
        places = samples * height * width
        channel_rows.kernels().max_pool_backward[_grid(places, channels)](
            dy, chosen, dx, places, *ctx.sizes, **ctx.window, ROWS=ROWS, COLUMNS=COLUMNS
        )
        return dx, None, None, None


def _grid(places: int, channels: int) -> tuple[int, int]:
    return -(-places // ROWS), -(-channels // COLUMNS)
