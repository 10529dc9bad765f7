"""Inside a block batch norms use the statistics that it names; outside, nothing has happened."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

from fedkeel.errors import MethodError
from fedkeel.nn import batch_norms, batch_statistics, frozen_statistics, using_statistics


def network(dimensions: int = 2) -> nn.Sequential:
    convolution = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dimensions]
    norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[dimensions]
    model = nn.Sequential(convolution(2, 3, 1), norm(3), nn.Dropout(0.5), norm(3, affine=False))
    for name in ("1", "3"):
        model.get_submodule(name).running_mean.normal_()
        model.get_submodule(name).running_var.uniform_(0.5, 2)
    return model


def given(model: nn.Module) -> dict[str, Tensor]:
    return {
        f"{name}.{buffer}": torch.rand(norm.num_features) + 0.5
        for name, norm in batch_norms(model).items()
        for buffer in ("running_mean", "running_var")
    }


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    state = model.state_dict()
    return list(state) == list(before) and all(torch.equal(state[name], before[name]) for name in before)


@pytest.mark.parametrize("dimensions", [1, 2])
def test_given_statistics_are_used_in_training_and_the_own_ones_stay(dimensions: int) -> None:
    model = network(dimensions)
    model[2].p = 0.0
    statistics = given(model)
    x = torch.randn(4, 2, *[3] * dimensions, requires_grad=True)
    reference = copy.deepcopy(model).eval()
    reference.load_state_dict({**reference.state_dict(), **statistics})
    before = copy.deepcopy(model.state_dict())
    with using_statistics(model, statistics):
        y = model(x)
        assert model.training
    torch.testing.assert_close(y, reference(x))
    y.square().sum().backward()
    reference(x.detach()).square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(model[0].weight.grad, reference[0].weight.grad)
    torch.testing.assert_close(model[1].weight.grad, reference[1].weight.grad)
    assert unchanged(model, before)
    assert all(module.training for module in model.modules())


def test_frozen_statistics_freeze_batch_norm_and_nothing_else() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    x = torch.ones(4, 2, 3, 3)
    with frozen_statistics(model):
        assert not torch.equal(model(x), model(x))  # dropout is on
        assert [m.training for m in model] == [True, False, True, False]
        model[2].p = 0.0
        torch.testing.assert_close(model(x), copy.deepcopy(model).eval()(x))
    assert unchanged(model, before)


def test_batch_statistics_are_used_in_evaluation_and_leave_the_running_ones() -> None:
    model = network().eval()
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(8, 2, 3, 3) * 5 + 3
    with batch_statistics(model):
        y = model(x)
        assert not model[2].training
    torch.testing.assert_close(y.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    assert unchanged(model, before)
    assert not any(module.training for module in model.modules())
    assert model[1].track_running_stats


def test_blocks_nest_and_the_inner_one_counts() -> None:
    model = network()
    model[2].p = 0.0
    outer, inner = given(model), given(model)
    x = torch.randn(4, 2, 3, 3)

    def alone(statistics: dict[str, Tensor]) -> Tensor:
        with using_statistics(model, statistics):
            out: Tensor = model(x)
            return out

    before = copy.deepcopy(model.state_dict())
    with batch_statistics(model), using_statistics(model, outer):
        with using_statistics(model, inner):
            assert torch.equal(model(x), alone(inner))
        assert torch.equal(model(x), alone(outer))
        with batch_statistics(model):
            torch.testing.assert_close(model(x).mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    assert unchanged(model, before)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("block", [lambda m: using_statistics(m, given(m)), frozen_statistics, batch_statistics])
def test_an_exception_leaves_everything_as_it_was(block: Callable[[nn.Module], AbstractContextManager[None]]) -> None:
    model = network()
    own = model[1].running_mean
    with pytest.raises(ZeroDivisionError), block(model):
        raise ZeroDivisionError
    assert model[1].running_mean is own
    assert all(module.training for module in model.modules())
    assert model[1].track_running_stats


def test_statistics_of_another_model_are_refused() -> None:
    with (
        pytest.raises(MethodError, match="None of the given statistics"),
        using_statistics(network(), {"encoder.bn1.running_mean": torch.zeros(3)}),
    ):
        pass
