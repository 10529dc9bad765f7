"""`FusedSGD` takes PyTorch's steps, to the last bit; all others are PyTorch's own."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn

from fedkeel.config import Config
from fedkeel.engine.optimizers import OPTIMIZERS, Fused, FusedSGD, check, local_optimizer, uncapturable
from fedkeel.errors import FedkeelError


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
    direct = FusedSGD(ours, 0.1, momentum, weight_decay)
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


def test_the_learning_rate_may_be_a_tensor_that_changes_between_steps() -> None:
    ours, theirs, rate = parameters(), parameters(), torch.tensor(0.0)
    direct, plain = FusedSGD(ours, rate, 0.0, 0.0), FusedSGD(theirs, 0.3, 0.0, 0.0)
    for of in (ours, theirs):
        gradients(5, of)
    direct.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, parameters(), strict=True))
    rate.fill_(0.3)
    direct.step()
    plain.step()
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_reset_forgets_all_that_steps_have_left_and_keeps_its_place(name: str) -> None:
    ours, theirs = parameters(), parameters()
    made, fresh = (local_optimizer(of, config(name), 0.01) for of in (ours, theirs))
    assert isinstance(made, FusedSGD | Fused)
    held = None
    for _ in range(2):
        for parameter, start in zip(ours, parameters(), strict=True):
            parameter.data.copy_(start.data)
        gradients(5, ours)
        made.step()
        places = [tensor.data_ptr() for tensor in state_of(made)]
        assert places
        assert held in (None, places)
        held = places
        made.reset()
    gradients(5, theirs)
    fresh.step()
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def state_of(made: FusedSGD | Fused) -> list[torch.Tensor]:
    if isinstance(made, FusedSGD):
        return made.momenta
    return [value for state in made.optimizer.state.values() for value in state.values()]


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_gradient_in_another_layout_is_laid_out_as_its_parameter(name: str) -> None:
    ours, theirs = parameters()[:1], parameters()[:1]
    gradient = torch.arange(7 * 27, dtype=torch.float32).reshape(7, 3, 3, 3) - 90
    theirs[0].grad = torch.empty_like(theirs[0], requires_grad=False).copy_(gradient)
    ours[0].grad = gradient  # contiguous, where the parameter has its channels last
    for of in (ours, theirs):
        local_optimizer(of, config(name), 0.1).step()
    assert torch.equal(ours[0], theirs[0])
    assert not torch.equal(ours[0], parameters()[0])


# -- any of torch's, by name -----------------------------------------------------------------------------------------
NAMES = sorted(OPTIMIZERS.names())


def config(optimizer: str, **options: Any) -> Config:
    return Config(**{"optimizer": optimizer, "learning_rate": 0.01, "weight_decay": 0.1, "momentum": 0.8, **options})


def test_all_of_torchs_are_there_but_for_those_that_need_more_than_a_step_has() -> None:
    classes = {name.lower() for name, kind in vars(torch.optim).items() if isinstance(kind, type)}
    assert {*NAMES} == classes - {"optimizer", "lbfgs", "sparseadam", "muon"}
    assert {"sgd", "adam", "adamw", "adagrad", "rmsprop", "radam", "nadam"} <= {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_each_takes_torchs_own_steps_with_the_options_of_the_run(name: str) -> None:
    kind = next(kind for known, kind in vars(torch.optim).items() if known.lower() == name)
    takes = inspect.signature(kind).parameters
    options = {option: value for option, value in {"weight_decay": 0.1, "momentum": 0.8}.items() if option in takes}
    ours, theirs = parameters()[:2], parameters()[:2]
    made, plain = local_optimizer(ours, config(name), 0.01), kind(theirs, lr=0.01, **options)
    for step in (3, 4, 5):
        for of, optimizer in ((ours, made), (theirs, plain)):
            gradients(step + 10, of)
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert not torch.equal(ours[0], parameters()[0])


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("adam(betas=(0.5, 0.9), amsgrad=true)", {"betas": (0.5, 0.9), "amsgrad": True}),
        ("rmsprop(alpha=0.95, centered=true)", {"alpha": 0.95, "centered": True, "momentum": 0.8}),
        ("sgd(nesterov=true)", {"nesterov": True, "momentum": 0.8, "weight_decay": 0.1}),
        ("adagrad(initial_accumulator_value=1)", {"initial_accumulator_value": 1.0}),
        ("adamw(eps=1e-3)", {"eps": 1e-3, "weight_decay": 0.1}),
    ],
)
def test_options_in_brackets_are_the_optimisers_own(text: str, options: dict[str, Any]) -> None:
    check(config(text))
    made: Any = local_optimizer(parameters(), config(text), 0.01)
    group = made.param_groups[0]
    assert {name: group[name] for name in options} == options
    assert group["lr"] == 0.01


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("sdg", "did you mean 'sgd'?"),
        ("lbfgs", "There is no optimizer named 'lbfgs'"),
        ("adam(beta=0.9)", "The optimizer 'adam' has no option 'beta': did you mean 'betas'?"),
        ("adam(lr=0.1)", "has no option 'lr'"),
        ("adam(foreach=true)", "has no option 'foreach'"),
        ("adam(betas=(2, 3))", "cannot take a step: Invalid beta parameter"),
        ("adam(betas=0.9)", "The 'betas' of adam is 0.9: give 2 numbers in brackets."),
        ("adam(amsgrad=often)", "The 'amsgrad' of adam is 'often', which is not true or false."),
        ("rmsprop(alpha=x)", "The 'alpha' of rmsprop is 'x', which is not a number."),
        ("sgd(nesterov=true, dampening=0.5)", "cannot take a step: Nesterov momentum requires"),
    ],
)
def test_one_sentence_says_what_to_give(text: str, sentence: str) -> None:
    with pytest.raises(FedkeelError) as refused:
        check(config(text))
    assert sentence in str(refused.value)


def test_one_of_one_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OPTIMIZERS, "_entries", dict(OPTIMIZERS._entries))

    @OPTIMIZERS.register("signs")
    class Signs(torch.optim.Optimizer):
        """Steps of one length."""

        def __init__(self, params: Any, lr: float = 0.1, scale: float = 1.0) -> None:
            super().__init__(params, {"lr": lr, "scale": scale})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.sub_(group["lr"] * group["scale"] * parameter.grad.sign())

    check(config("signs(scale=2)"))
    made = local_optimizer([parameter := nn.Parameter(torch.zeros(3))], config("signs(scale=2)"), 0.5)
    parameter.grad = torch.tensor([3.0, -1.0, 0.0])
    made.step()
    assert parameter.tolist() == [-1.0, 1.0, 0.0]
    assert "asks the host" in uncapturable(config("signs"))


# -- where steps are captured ----------------------------------------------------------------------------------------
def test_which_can_be_captured() -> None:
    assert {name for name in NAMES if not uncapturable(config(name))} == {"sgd", "adamw"}
    assert uncapturable(config("sgd(nesterov=true)"))
    made = local_optimizer(parameters(), config("adamw"), torch.tensor(0.01))
    assert isinstance(made, Fused)
    assert all(group["capturable"] and group["fused"] for group in made.optimizer.param_groups)
