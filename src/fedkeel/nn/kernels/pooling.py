"""Max-pooling of an activation whose channels lie last, as one GPU kernel each way.

At 224 px the pooling behind a ResNet's first layer takes PyTorch longer than any of its convolutions. The result is the
same, and so is the gradient, whose sums have a fixed order here.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fedkeel.nn.kernels import runs_on, triton_kernels
from fedkeel.nn.kernels.norms import TYPES, is_rows

TILE = {"ROWS": 32, "COLUMNS": 64}


def pool_on_rows(model: nn.Module) -> None:
    """Have the plain max-pooling layers of a network use the kernel where it can run; nothing else of them changes."""
    for module in model.modules():
        if type(module) is nn.MaxPool2d and _is_plain(module):
            module.__class__ = MaxPool2d


def _is_plain(pool: nn.MaxPool2d) -> bool:
    square = all(isinstance(size, int) for size in (pool.kernel_size, pool.stride, pool.padding))
    return square and pool.dilation == 1 and not pool.ceil_mode and not pool.return_indices


class MaxPool2d(nn.MaxPool2d):
    """As `nn.MaxPool2d`, of square windows."""

    def forward(self, x: Tensor) -> Tensor:
        if self.on_rows(x):
            y: Tensor = _MaxPool.apply(x, self.kernel_size, self.stride, self.padding)  # type: ignore[no-untyped-call]
            return y
        return super().forward(x)  # type: ignore[no-any-return]

    @staticmethod
    def on_rows(x: Tensor) -> bool:
        lies_last = x.ndim == 4 and not x.is_contiguous() and is_rows(x)
        return lies_last and x.dtype in TYPES and runs_on("max-pool", x.device)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: int, stride: int, padding: int) -> Tensor:
        samples, channels, height, width = x.shape
        out_height, out_width = ((size + 2 * padding - kernel) // stride + 1 for size in (height, width))
        shape = samples, channels, out_height, out_width
        y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        choice = torch.empty(shape, dtype=torch.int8, device=x.device, memory_format=torch.channels_last)
        ctx.sizes = channels, height, width, out_height, out_width
        ctx.window = {"KERNEL": kernel, "STRIDE": stride, "PADDING": padding} | TILE
        places = samples * out_height * out_width
        launch = triton_kernels("triton_pooling").max_pool_forward[_grid(places, channels)]
        launch(x, y, choice, places, *ctx.sizes, **ctx.window)
        ctx.save_for_backward(choice)
        ctx.shape = x.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (choice,) = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = torch.empty(ctx.shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
        samples, channels, height, width = ctx.shape
        places = samples * height * width
        launch = triton_kernels("triton_pooling").max_pool_backward[_grid(places, channels)]
        launch(dy, choice, dx, places, *ctx.sizes, **ctx.window)
        return dx, None, None, None


def _grid(places: int, channels: int) -> tuple[int, int]:
    return -(-places // TILE["ROWS"]), -(-channels // TILE["COLUMNS"])
