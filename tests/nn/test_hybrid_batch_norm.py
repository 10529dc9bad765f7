"""HBN against the paper's equations, computed independently in NumPy with float64."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedkeel import models
from fedkeel.errors import FedkeelError, MethodError
from fedkeel.nn import HybridBatchNorm, HybridBatchNorm2d, batch_norms, batch_statistics, to_hybrid
from fedkeel.nn.hybrid_batch_norm import hybrid_norms

SHAPES = [(5, 3), (5, 3, 4), (4, 3, 2, 5), (2, 3, 2, 2, 3)]


def layer(kind: type[HybridBatchNorm], **options: Any) -> HybridBatchNorm:
    made = kind(3, **options).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(3, generator=generator, dtype=torch.float64))
        made.running_mean.copy_(torch.randn(3, generator=generator, dtype=torch.float64))
        made.running_var.copy_(torch.rand(3, generator=generator, dtype=torch.float64) + 0.5)
    return made


def by_hand(hbn: HybridBatchNorm, x: np.ndarray, share: np.ndarray) -> np.ndarray:
    """Eqs. 1, 9 and 10, one channel after another."""
    y = np.empty_like(x)
    for c in range(x.shape[1]):
        values = x[:, c]
        mean_b = values.sum() / values.size
        var_b = ((values - mean_b) ** 2).sum() / values.size
        mean = (1 - share[c]) * mean_b + share[c] * hbn.running_mean[c].item()
        var = (1 - share[c]) * var_b + share[c] * hbn.running_var[c].item()
        weight = 1.0 if hbn.weight is None else hbn.weight[c].item()
        bias = 0.0 if hbn.bias is None else hbn.bias[c].item()
        y[:, c] = weight * (values - mean) / np.sqrt(var + hbn.eps) + bias
    return y


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward_follows_the_equations(shape: tuple[int, ...], affine: bool) -> None:
    hbn = layer(HybridBatchNorm, affine=affine)
    x = np.random.default_rng(0).normal(2, 3, shape)
    e = np.exp(-hbn.alpha.detach().numpy())
    np.testing.assert_allclose(hbn(torch.from_numpy(x)).detach().numpy(), by_hand(hbn, x, 1 / (1 + e)), rtol=1e-10)
    hbn.eval()
    np.testing.assert_allclose(hbn(torch.from_numpy(x)).detach().numpy(), by_hand(hbn, x, np.ones(3)), rtol=1e-10)


@pytest.mark.parametrize(("mix", "share"), [("fixed", 0.5), ("global", 1.0), ("batch", 0.0)])
def test_the_ablations_of_table_6(mix: str, share: float) -> None:
    hbn = layer(HybridBatchNorm2d, mix=mix)
    x = np.random.default_rng(1).normal(size=(4, 3, 2, 2))
    np.testing.assert_allclose(
        hbn(torch.from_numpy(x)).detach().numpy(), by_hand(hbn, x, np.full(3, share)), rtol=1e-10
    )
    assert not hbn.alpha.requires_grad


@pytest.mark.parametrize("mix", ["learned", "fixed", "global", "batch"])
@pytest.mark.parametrize("affine", [True, False])
def test_gradients_agree_with_finite_differences(affine: bool, mix: str) -> None:
    hbn = layer(HybridBatchNorm, affine=affine, mix=mix)
    x = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    trained = [p for p in hbn.parameters() if p.requires_grad]
    assert torch.autograd.gradcheck(lambda x, *_: hbn(x), (x, *trained))


def test_single_samples_and_half_precision_work() -> None:
    hbn = HybridBatchNorm(4)
    assert hbn(torch.randn(1, 4)).isfinite().all()
    x = torch.randn(16, 4, 9) * 3 + 20
    narrow = x.bfloat16().requires_grad_()
    y = hbn(narrow)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), hbn(narrow.float()), atol=0.05, rtol=0.01)
    y.sum().backward()
    assert narrow.grad is not None
    assert narrow.grad.dtype == torch.bfloat16


@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(1, 7), min_size=1, max_size=5), offset=st.floats(-50, 50))
def test_recorded_batches_pool_to_the_moments_of_the_whole(sizes: list[int], offset: float) -> None:
    hbn = layer(HybridBatchNorm2d)
    x = np.random.default_rng(sum(sizes)).normal(offset, 2, (sum(sizes), 3, 2, 2))
    hbn.start_recording("batch")
    with torch.no_grad():
        for part in torch.from_numpy(x).split(sizes):
            hbn(part)
    mean, var, count = hbn.recorded()
    assert int(count) == sum(sizes)
    np.testing.assert_allclose(mean, x.mean((0, 2, 3)), atol=1e-10)
    np.testing.assert_allclose(var, x.var((0, 2, 3)), atol=1e-8)


def test_the_recorded_mixture_pools_the_moments_it_normalised_with() -> None:
    hbn = layer(HybridBatchNorm)
    share = 1 / (1 + np.exp(-hbn.alpha.detach().numpy()))
    batches = [np.random.default_rng(i).normal(i, 1 + i, (n, 3)) for i, n in enumerate((2, 5, 3))]
    means = np.stack([(1 - share) * b.mean(0) + share * hbn.running_mean.numpy() for b in batches])
    variances = np.stack([(1 - share) * b.var(0) + share * hbn.running_var.numpy() for b in batches])
    counts = np.array([[2], [5], [3]])
    pooled_mean = (counts * means).sum(0) / 10
    pooled_var = (counts * (variances + (means - pooled_mean) ** 2)).sum(0) / 10
    hbn.start_recording()
    for batch in batches:
        hbn(torch.from_numpy(batch))
    mean, var, count = hbn.recorded()
    hbn(torch.from_numpy(batches[0]) + 100)
    hbn.eval()(torch.from_numpy(batches[0]))
    np.testing.assert_allclose(mean, pooled_mean, rtol=1e-10)
    np.testing.assert_allclose(var, pooled_var, rtol=1e-10)
    assert int(count) == 10
    assert set(hbn.state_dict()) == {"weight", "bias", "alpha", "running_mean", "running_var"}
    hbn.start_recording()
    assert int(hbn.recorded()[2]) == 0


def test_to_hybrid_keeps_what_the_model_does_in_evaluation() -> None:
    model = models.build("small_cnn", num_classes=3, projector=8)
    model(torch.randn(8, 3, 32, 32))
    model.eval()
    before, names = copy.deepcopy(model), list(batch_norms(model))
    assert to_hybrid(model) == names
    assert list(hybrid_norms(model)) == names
    assert not batch_norms(model)
    assert isinstance(model.encoder.projector[1], HybridBatchNorm)
    x = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(model(x).logits, before(x).logits)
    kept = {name for name in before.state_dict() if not name.endswith("num_batches_tracked")}
    assert set(model.state_dict()) == kept | {f"{name}.alpha" for name in names}


def test_mistakes_are_refused() -> None:
    with pytest.raises(FedkeelError, match="no mix 'learn'"):
        HybridBatchNorm2d(2, mix="learn")
    with pytest.raises(MethodError, match="no batch norm that HBN"):
        to_hybrid(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("affine", [False, True])
def test_the_gpu_computes_what_the_cpu_computes(affine: bool, channels_last: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 6, 4, 3, generator=generator, dtype=torch.float64) * 2 + 1
    dy = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    results = []
    for device in ("cpu", "cuda"):
        layer = HybridBatchNorm2d(6, affine=affine).double().to(device)
        with torch.no_grad():
            layer.alpha.copy_(torch.linspace(-1, 1, 6))
            layer.running_mean.copy_(torch.linspace(0, 1, 6))
            layer.running_var.copy_(torch.linspace(0.5, 2, 6))
        given = x.clone().to(device)  # a leaf of its own on each device
        if channels_last:
            given = given.contiguous(memory_format=torch.channels_last)
        given.requires_grad_()
        y = layer(given)
        y.backward(dy.to(device))
        gradients = [given.grad, *(p.grad for p in layer.parameters())]
        results.append([y.detach().cpu(), *(g.cpu() for g in gradients if g is not None)])
    for on_cpu, on_gpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mix", ["learned", "global"])
def test_tested_under_batch_statistics_it_uses_those_of_the_batch_alone(mix: str) -> None:
    made = layer(HybridBatchNorm2d, mix=mix).eval()
    before = copy.deepcopy(made.state_dict())
    x = torch.randn(4, 3, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3 + 2
    with batch_statistics(nn.Sequential(made)):
        y = made(x).detach().numpy()
    made.running_mean.copy_(x.mean((0, 2, 3)))
    made.running_var.copy_(x.var((0, 2, 3), correction=0))
    np.testing.assert_allclose(y, made(x).detach().numpy(), rtol=1e-9, atol=1e-9)
    made.load_state_dict(before)
    np.testing.assert_array_less(1e-3, np.abs(made(x).detach().numpy() - y).max())  # outside, the global ones again
