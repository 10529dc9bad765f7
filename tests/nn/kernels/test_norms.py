"""GReg's pair against PyTorch in float64, in values and in gradients; and how an activation is cut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.nn.kernels import norms
from fedkeel.nn.paired_batch_norm import paired

SHAPES = {
    "2d": (6, 10),
    "4d": (16, 64, 14, 14),
    "odd": (4, 70, 5, 3),
    "one place": (2, 16, 1, 1),
    "wide": (3, 515, 7, 7),
    "many rows": (32, 16, 40, 40),
    "5d": (2, 5, 3, 2, 2),
}
INTERPRETED = ("2d", "odd", "one place", "5d")  # where each program takes Python's time


def far(one: Tensor, other: Tensor) -> float:
    return float((one.detach().double() - other.double()).abs().max() / other.abs().max())


def activation(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    x = (torch.randn(shape, device=device) * 3 + 5).to(dtype)
    return x.contiguous(memory_format=norms.FORMATS[x.ndim]) if x.ndim in norms.FORMATS else x


@pytest.mark.parametrize("rows", [1, 7, 64, 4096, 50176, 10**6])
@pytest.mark.parametrize("channels", [1, 3, 16, 64, 65, 515, 2048])
def test_splits_cover_every_row_once(rows: int, channels: int) -> None:
    cut = norms.tiling(rows, channels)
    assert 1 <= cut.splits <= norms.MOST_SPLITS
    assert (cut.splits - 1) * cut.per_split < rows <= cut.splits * cut.per_split
    assert cut.tiles[0] * cut.tile["ROWS"] >= rows
    assert cut.tiles[1] * cut.tile["COLUMNS"] >= channels


def test_rows_are_told_from_other_layouts() -> None:
    x = torch.zeros(2, 3, 4, 5)
    assert not norms.is_rows(x)
    assert norms.is_rows(x.to(memory_format=torch.channels_last))
    assert norms.is_rows(torch.zeros(7, 3))
    assert not norms.is_rows(torch.zeros(3, 7).T)
    assert not norms.is_rows(torch.zeros(2, 3, 9))
    assert not norms.is_rows(torch.zeros(0, 3))


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("doubled", [False, True], ids=["shared", "doubled"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_a_pair_is_two_batch_norms(
    device: torch.device, shape: str, dtype: torch.dtype, doubled: bool, affine: bool
) -> None:
    if device.type == "cpu" and (shape not in INTERPRETED or dtype != torch.float32):
        pytest.skip("for a GPU")
    torch.manual_seed(1)
    n, c, *places = SHAPES[shape]
    x = activation((2 * n if doubled else n, c, *places), device, dtype).requires_grad_()
    norm = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[x.ndim](c, affine=affine, device=device)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    given = torch.randn(c, device=device), torch.rand(c, device=device) + 0.5
    exact = x.detach().double().requires_grad_()
    weight, bias = (p.detach().double().requires_grad_() for p in norm.parameters()) if affine else (None, None)
    mean, var = norm.running_mean.double(), norm.running_var.double()
    halves = (exact[:n], exact[n:]) if doubled else (exact, exact)
    expected = torch.cat([
        F.batch_norm(halves[0], mean, var, weight, bias, True, norm.momentum, norm.eps),
        F.batch_norm(halves[1], *(s.double() for s in given), weight, bias, False, 0.0, norm.eps),
    ])  # fmt: skip
    assert norms.takes("paired", x, *given, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    statistics = dict(zip(("norm.running_mean", "norm.running_var"), given, strict=True))
    y = paired("norm", norm, x, statistics, doubled)
    dy = torch.randn(y.shape, device=device).to(dtype)  # in whatever layout
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


def test_sums_are_the_same_every_time(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("for a GPU")
    x = activation((32, 64, 28, 28), device)
    cut = norms.tiling(32 * 28 * 28, 64)
    first = norms._partial_moments(x, cut)
    assert all(torch.equal(norms._partial_moments(x, cut), first) for _ in range(20))
