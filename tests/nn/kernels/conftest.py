"""Where the kernels run in tests: on a GPU, and everywhere as interpreted on the CPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeel.nn import kernels
from fedkeel.nn.kernels import norms, weights
from tests.nn.kernels import interpreted

GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    if request.param == "cuda":
        assert all(kernels.usable(name, torch.ones(1, device="cuda")) for name in kernels.NAMES)
        yield torch.device("cuda")
        return
    for module in (norms, weights):
        monkeypatch.setattr(module, "usable", usable_on_the_cpu)
    monkeypatch.setattr(torch, "batch_norm_elemt", elemt)
    monkeypatch.setattr(torch, "batch_norm_backward_elemt", backward_elemt)
    with interpreted.triton():
        yield torch.device("cpu")


@pytest.fixture
def plainly() -> Callable[[Callable[[], Any]], Any]:
    """Calls a function with the kernels switched off."""

    def call(function: Callable[[], Any]) -> Any:
        with kernels.without(*kernels.NAMES):
            return function()

    return call


def usable_on_the_cpu(name: str, *tensors: Tensor | None) -> bool:
    return kernels.is_on(name) and all(t is None or t.dtype == torch.float32 for t in tensors)


def elemt(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, _: float) -> Tensor:
    """What synchronised batch norm computes on a GPU, by its definition."""
    shape = [1, -1] + [1] * (x.ndim - 2)
    y = (x - mean.view(shape)) * inverse.view(shape)
    return y if weight is None or bias is None else y * weight.view(shape) + bias.view(shape)


def backward_elemt(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_centred: Tensor,
    count: Tensor,
) -> Tensor:
    shape = [1, -1] + [1] * (x.ndim - 2)
    scale = inverse if weight is None else inverse * weight
    level, slope = sum_dy / count, sum_dy_centred / count * inverse.square()
    return (dy - level.view(shape) - (x - mean.view(shape)) * slope.view(shape)) * scale.view(shape)
