"""Max-pooling against PyTorch's, on the CPU, where it is PyTorch's, and on the GPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from fedkeel.nn.kernels.pooling import MaxPool2d, pool_on_rows

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 2, 1), (2, 2, 0), (3, 1, 1)])
@pytest.mark.parametrize("shape", [(2, 64, 112, 112), (3, 70, 9, 8), (1, 5, 7, 7)], ids=str)
def test_values_and_gradients(device, dtype, kernel, stride, padding, shape) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, device=device).to(dtype).contiguous(memory_format=torch.channels_last).requires_grad_()
    pool, reference = MaxPool2d(kernel, stride, padding), nn.MaxPool2d(kernel, stride, padding)
    y, expected = pool(x), reference(x)
    dy = torch.randn_like(expected)
    assert torch.equal(y, expected)
    assert pool.on_rows(x) == (device == "cuda")
    (dx,), (wanted,) = torch.autograd.grad(y, x, dy), torch.autograd.grad(expected, x, dy)
    loose = dtype == torch.bfloat16
    torch.testing.assert_close(dx, wanted, rtol=0.02 if loose else 1e-6, atol=1e-2 if loose else 1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_what_is_not_finite_goes_through() -> None:
    x = torch.randn(1, 8, 8, 8, device="cuda").contiguous(memory_format=torch.channels_last)
    x[0, 0, 3, 3] = float("nan")
    assert MaxPool2d(3, 2, 1)(x).isnan().equal(nn.MaxPool2d(3, 2, 1)(x).isnan())


def test_only_plain_layers_are_changed_and_nothing_of_their_state() -> None:
    model = nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d((2, 1)), nn.AvgPool2d(2))
    before = repr(model), list(model.state_dict())
    pool_on_rows(model)
    assert [type(layer) for layer in model] == [MaxPool2d, nn.MaxPool2d, nn.MaxPool2d, nn.AvgPool2d]
    assert (repr(model), list(model.state_dict())) == before
    x = torch.randn(2, 3, 9, 9)
    assert torch.equal(model[0](x), nn.MaxPool2d(3, 2, 1)(x))
