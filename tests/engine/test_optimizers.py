"""The optimiser called directly takes PyTorch's steps, to the last bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedkeel.config import Config
from fedkeel.engine.optimizers import DirectSGD, lay_out_gradients, local_optimizer, reset


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(7, 3, 3, 3), (7,), (5, 11)]
    made = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    made[0].data = made[0].data.contiguous(memory_format=torch.channels_last)
    return made


def gradients(step: int, of: list[nn.Parameter]) -> None:
    """The last parameter has none in the first two steps, and the second none in the fourth."""
    generator = torch.Generator().manual_seed(100 + step)
    for number, parameter in enumerate(of):
        drawn = torch.randn(parameter.shape, generator=generator)
        left_out = (number == 2 and step < 2) or (number == 1 and step == 3)
        parameter.grad = None if left_out else torch.empty_like(parameter, requires_grad=False).copy_(drawn)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_steps_are_those_of_torch(momentum: float, weight_decay: float) -> None:
    ours, theirs = parameters(), parameters()
    direct = DirectSGD(ours, 0.1, momentum, weight_decay)
    # One optimiser a parameter: PyTorch's fused step takes the first momenta of all of them to be made at once.
    plain = [torch.optim.SGD([p], lr=0.1, momentum=momentum, weight_decay=weight_decay, fused=True) for p in theirs]
    for step in range(6):
        gradients(step, ours)
        gradients(step, theirs)
        direct.step()
        for optimizer, parameter in zip(plain, theirs, strict=True):
            if parameter.grad is not None:
                optimizer.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
    assert not torch.equal(ours[2], parameters()[2])


def test_the_learning_rate_may_change_between_steps() -> None:
    ours = parameters()
    direct = DirectSGD(ours, 0.1, 0.0, 0.0)
    before = ours[0].detach().clone()
    gradients(5, ours)
    direct.param_groups[0]["lr"] = 0.0
    direct.step()
    assert torch.equal(ours[0], before)


def test_a_reset_forgets_the_momentum_and_keeps_its_place() -> None:
    ours = parameters()
    direct = DirectSGD(ours, 0.1, 0.9, 0.0)
    gradients(5, ours)
    direct.step()
    held = direct.state[ours[0]]["momentum_buffer"]
    assert held.abs().sum() > 0
    reset(direct)
    assert held.abs().sum() == 0
    assert direct.state[ours[0]]["momentum_buffer"] is held


def test_a_gradient_in_another_layout_is_laid_out_as_its_parameter() -> None:
    ours = parameters()
    direct = DirectSGD(ours, 1.0, 0.0, 0.0)
    gradient = torch.arange(7 * 27, dtype=torch.float32).reshape(7, 3, 3, 3)
    ours[0].grad = gradient  # contiguous, where the parameter has its channels last
    before = ours[0].detach().clone()
    lay_out_gradients(direct)
    direct.step()
    torch.testing.assert_close(ours[0].detach(), before - gradient)


def test_adamw_is_torchs_own() -> None:
    made = local_optimizer(parameters(), Config(optimizer="adamw", weight_decay=0.05), 0.002)
    assert type(made) is torch.optim.AdamW
    assert made.param_groups[0]["lr"] == 0.002
    assert made.param_groups[0]["weight_decay"] == 0.05
