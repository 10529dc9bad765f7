"""The kernels over rows of channels against PyTorch in float64, in values and in gradients."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.nn import paired_batch_norm
from fedkeel.nn.kernels import channel_rows
from fedkeel.nn.kernels.channel_rows import FORMATS

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
SHAPES = {
    "2d": (6, 10),
    "4d": (16, 64, 14, 14),
    "odd": (4, 70, 5, 3),
    "one place": (2, 16, 1, 1),
    "wide": (3, 515, 7, 7),
    "many rows": (32, 16, 40, 40),
    "5d": (2, 5, 3, 2, 2),
}


def far(one: Tensor, other: Tensor) -> float:
    return float((one.detach().double() - other.double()).abs().max() / other.abs().max())


@pytest.mark.parametrize("rows", [1, 7, 64, 4096, 50176, 10**6])
@pytest.mark.parametrize("channels", [1, 3, 16, 64, 65, 515, 2048])
def test_splits_cover_every_row_once(rows: int, channels: int) -> None:
    cut = channel_rows.tiling(rows, channels)
    assert 1 <= cut.splits <= channel_rows.MOST_SPLITS
    assert (cut.splits - 1) * cut.per_split < rows <= cut.splits * cut.per_split
    assert cut.tiles[0] * cut.tile_rows >= rows
    assert cut.blocks * cut.tile_columns >= channels


def test_rows_are_told_from_other_layouts() -> None:
    x = torch.zeros(2, 3, 4, 5)
    assert channel_rows.rows_of(x) is None
    assert channel_rows.rows_of(x.to(memory_format=torch.channels_last)) == 40
    assert channel_rows.rows_of(torch.zeros(7, 3)) == 7
    assert channel_rows.rows_of(torch.zeros(3, 7).T) is None
    assert channel_rows.rows_of(torch.zeros(2, 3, 9)) is None
    assert channel_rows.rows_of(torch.zeros(0, 3)) is None


class TestOnGpu:
    pytestmark = gpu

    @staticmethod
    def activation(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        x = (torch.randn(shape, device="cuda") * 3 + 5).to(dtype)
        return x.contiguous(memory_format=FORMATS[x.ndim]) if x.ndim in FORMATS else x

    @pytest.mark.parametrize("shape", list(SHAPES))
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("doubled", [False, True], ids=["shared", "doubled"])
    @pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
    @pytest.mark.parametrize("relu", [False, True], ids=["linear", "relu"])
    def test_a_pair_is_two_batch_norms(
        self, shape: str, dtype: torch.dtype, doubled: bool, affine: bool, relu: bool
    ) -> None:
        torch.manual_seed(1)
        n, c, *places = SHAPES[shape]
        x = self.activation((2 * n if doubled else n, c, *places), dtype).requires_grad_()
        norm = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[x.ndim](c, affine=affine).cuda()
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.normal_()
        statistics = {"norm.running_mean": torch.randn(c).cuda(), "norm.running_var": torch.rand(c).cuda() + 0.5}
        exact = x.detach().double().requires_grad_()
        weight, bias = (p.detach().double().requires_grad_() for p in norm.parameters()) if affine else (None, None)
        mean, var = norm.running_mean.double(), norm.running_var.double()
        halves = (exact[:n], exact[n:]) if doubled else (exact, exact)
        expected = torch.cat([
            F.batch_norm(halves[0], mean, var, weight, bias, True, norm.momentum, norm.eps),
            F.batch_norm(halves[1], *(s.double() for s in statistics.values()), weight, bias, False, 0.0, norm.eps),
        ])  # fmt: skip
        expected = F.relu(expected) if relu else expected
        assert paired_batch_norm._on_rows(norm, x, *statistics.values())
        y = paired_batch_norm._paired("norm", norm, x, statistics, doubled, relu)
        dy = torch.randn(y.shape, device="cuda").to(dtype)  # in whatever layout
        y.backward(dy)
        expected.backward(dy.double())
        rounding = 1e-5 if dtype == torch.float32 else 1e-2
        assert far(y, expected.detach()) < rounding
        assert far(x.grad, exact.grad) < rounding
        assert x.grad.stride() == x.stride()
        assert far(norm.running_mean, mean) < 1e-5
        assert far(norm.running_var, var) < 1e-5
        assert int(norm.num_batches_tracked) == 1
        if affine:
            assert far(norm.weight.grad, weight.grad) < 1e-5
            assert far(norm.bias.grad, bias.grad) < 1e-5

    @pytest.mark.parametrize("shape", list(SHAPES))
    def test_moments_and_products_are_those_of_synchronised_batch_norm(self, shape: str) -> None:
        torch.manual_seed(2)
        x = self.activation(SHAPES[shape], torch.float32)
        dy = torch.randn_like(x)
        axes = [0, *range(2, x.ndim)]
        mean, inverse = channel_rows.moments(x, 1e-5)
        var = x.double().var(axes, correction=0)
        assert far(mean, x.double().mean(axes)) < 1e-5
        assert far(inverse, (var + 1e-5).rsqrt()) < 1e-5
        sum_dy, sum_dy_centred, d_weight = channel_rows.products(dy, x, mean, inverse)
        centred = x.double() - x.double().mean(axes, keepdim=True)
        assert far(sum_dy, dy.double().sum(axes)) < 1e-4
        assert far(sum_dy_centred, (dy.double() * centred).sum(axes)) < 1e-4
        assert far(d_weight, (dy.double() * centred).sum(axes) * (var + 1e-5).rsqrt()) < 1e-4

    def test_sums_are_the_same_every_time(self) -> None:
        x = self.activation((32, 64, 28, 28), torch.float32)
        first = channel_rows.moments(x, 1e-5)
        for _ in range(20):
            assert all(torch.equal(one, other) for one, other in zip(channel_rows.moments(x, 1e-5), first, strict=True))
