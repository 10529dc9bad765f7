"""Gradient clipping against the papers' equations, computed independently in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedkeel.nn import HistoryClip, agc_

SHAPES = [(6, 3, 5, 5), (4, 7), (9,), (), (1, 3)]


def parameters(seed: int, scale: float = 1.0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for shape in SHAPES:
        parameter = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        parameter.grad = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        made.append(parameter)
    return made


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 99), clipping=st.floats(0.01, 3), scale=st.floats(0, 10))
def test_agc_follows_equation_4_unit_by_unit(seed: int, clipping: float, scale: float) -> None:
    given_ones = parameters(seed, scale)
    expected = []
    for parameter in given_ones:
        gradient, weight = parameter.grad.numpy().copy(), parameter.detach().numpy()
        units = range(len(weight)) if weight.ndim > 1 else [...]
        for i in units:
            limit = clipping * max(np.sqrt((weight[i] ** 2).sum()), 1e-3)
            length = np.sqrt((gradient[i] ** 2).sum())
            if length > limit:
                gradient[i] = gradient[i] * limit / length
        expected.append(gradient)
    agc_(given_ones, clipping)
    for parameter, gradient in zip(given_ones, expected, strict=True):
        np.testing.assert_allclose(parameter.grad, gradient, rtol=1e-9, atol=1e-12)


def test_agc_lets_a_unit_of_zeros_move_by_eps() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    parameter.grad = torch.tensor([[3.0, 0, 4], [0, 0, 0]])
    agc_([parameter], clipping=0.5, eps=1e-3)
    torch.testing.assert_close(parameter.grad, torch.tensor([[3e-4, 0, 4e-4], [0, 0, 0]]))


def set_gradients(tensors: list[nn.Parameter], norms: list[float | None]) -> None:
    for tensor, norm in zip(tensors, norms, strict=True):
        direction = torch.ones_like(tensor)
        tensor.grad = None if norm is None else direction / direction.norm() * norm


def norms_of(tensors: list[nn.Parameter]) -> list[float]:
    return [0.0 if t.grad is None else t.grad.norm().item() for t in tensors]


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.floats(0.01, 100), st.none() | st.floats(0.01, 100), st.booleans()), min_size=1, max_size=8
    )
)
def test_history_clip_follows_equation_10(steps: list[tuple[float, float | None, bool]]) -> None:
    tensors = [nn.Parameter(torch.zeros(4, 2)), nn.Parameter(torch.zeros(3))]
    clip = HistoryClip(tensors, alpha=1.5, beta=0.9)
    gamma: list[float | None] = [None, None]
    for *norms, clipping in steps:
        set_gradients(tensors, norms)
        clip.step(clip=clipping)
        after = norms_of(tensors)
        for i, norm in enumerate(norms):
            if norm is None:
                continue
            limit = np.inf if gamma[i] is None or not clipping else 1.5 * gamma[i]
            assert after[i] == pytest.approx(min(norm, limit), rel=1e-4)
            gamma[i] = norm if gamma[i] is None else 0.9 * gamma[i] + 0.1 * norm
    expected = [0.0 if g is None else g for g in gamma]
    np.testing.assert_allclose(clip.history, expected, rtol=1e-4)


def test_a_first_step_is_never_clipped_and_zeros_start_no_history() -> None:
    tensor = nn.Parameter(torch.zeros(4))
    clip = HistoryClip([tensor], alpha=0.5)
    set_gradients([tensor], [0.0])
    clip.step()
    set_gradients([tensor], [8.0])
    clip.step()
    assert tensor.grad.norm().item() == pytest.approx(8.0)
    set_gradients([tensor], [8.0])
    clip.step()
    assert tensor.grad.norm().item() == pytest.approx(4.0)


def test_norms_are_remembered_without_clipping_in_one_place() -> None:
    model = nn.Linear(3, 2)
    model(torch.randn(4, 3)).sum().backward()
    clip = HistoryClip(model.parameters())
    address, before = clip.history.data_ptr(), model.weight.grad.clone()
    clip.step(clip=False)
    assert torch.equal(model.weight.grad, before)
    assert clip.history.tolist() == pytest.approx([p.grad.norm().item() for p in model.parameters()])
    assert clip.history.data_ptr() == address  # a captured graph goes on seeing it


def test_a_gradient_that_is_not_finite_does_not_enter_the_history() -> None:
    tensor = nn.Parameter(torch.zeros(2))
    clip = HistoryClip([tensor])
    set_gradients([tensor], [2.0])
    clip.step()
    tensor.grad = torch.tensor([float("nan"), 1.0])
    clip.step()
    assert clip.history.tolist() == pytest.approx([2.0])
