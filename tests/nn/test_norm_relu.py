"""Pooling before the ReLU gives what pooling behind it gives, to the last bit, and so do the gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.nn.norm_relu import FUSED, norm_relu, norm_relu_pool


def with_ties_and_negatives() -> Tensor:
    """Values on a coarse grid: many equal maxima, many windows without a positive value."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(-4, 3, (5, 6, 13, 13), generator=generator).float()


@pytest.mark.parametrize(("size", "stride"), [(2, None), (3, 2)])
@pytest.mark.parametrize("norm", [nn.Identity(), nn.BatchNorm2d(6)], ids=["no norm", "batch norm"])
def test_relu_behind_the_pooling_changes_no_bit(norm: nn.Module, size: int, stride: int | None) -> None:
    results = []
    for pooled in (norm_relu_pool, lambda norm, x, size, stride: F.max_pool2d(F.relu(norm(x)), size, stride)):
        x = with_ties_and_negatives().requires_grad_()
        y = pooled(norm, x, size, stride)
        weights = torch.linspace(-1, 1, y.numel()).view_as(y)
        (gradient,) = torch.autograd.grad((y * weights).sum(), x)
        results.append((y.detach(), gradient))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert (results[0][0] == 0).any()
    assert (results[0][0] > 0).any()


def test_a_nan_stays_visible() -> None:
    x = torch.zeros(1, 1, 4, 4)
    x[0, 0, 1, 1] = torch.nan
    assert norm_relu_pool(nn.Identity(), x).isnan().sum() == 1


def test_a_methods_own_layer_and_relu_are_used_before_the_pooling() -> None:
    norm = nn.BatchNorm2d(6)
    norm.__dict__[FUSED] = lambda x: x.square()
    x = with_ties_and_negatives()
    assert torch.equal(norm_relu(norm, x), x.square())
    assert torch.equal(norm_relu_pool(norm, x), F.max_pool2d(x.square(), 2))
