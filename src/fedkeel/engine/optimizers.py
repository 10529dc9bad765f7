"""Local optimizers: PyTorch's own by name, `--optimizer 'adam(betas=(0.9, 0.99))'`; the usual ones made so that a step
costs little. `OPTIMIZERS.register("name")` above a class derived from `torch.optim.Optimizer` adds one.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fedkeel import spec
from fedkeel.config import Config
from fedkeel.errors import FedkeelError, first_line
from fedkeel.registry import Registry, signature_of

OF_THE_RUN = ("momentum", "weight_decay")  # options of `Config`
OF_THE_ENGINE = ("params", "lr", "foreach", "fused", "capturable", "differentiable", "maximize")
FUSED = ("sgd", "adamw")  # those that have one kernel for all parameters
UNFIT = ("optimizer", "lbfgs", "sparseadam", "muon")  # which need more than a step has, or take other gradients
OPTIMIZERS: Registry[torch.optim.Optimizer] = Registry("optimizer", given=(*OF_THE_RUN, *OF_THE_ENGINE))
for _name, _class in sorted(vars(torch.optim).items()):
    if inspect.isclass(_class) and _name.lower() not in UNFIT:
        OPTIMIZERS.register(_name.lower())(_class)


class LocalOptimizer(Protocol):
    """What a local step needs of an optimizer."""

    def step(self) -> Any: ...


class FusedSGD:
    """The steps of `torch.optim.SGD(fused=True)`, to the last bit, by the same kernel.

    PyTorch's own sorts parameters by device and type in every step, which for a small network takes longer than the
    arithmetic, and imports a compiler of two seconds when it is made. A momentum of zeros gives the same first step as
    none, so `reset` need not make the buffers anew: a captured step keeps them where they are.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], lr: float | Tensor, momentum: float, weight_decay: float
    ) -> None:
        self.parameters, self.lr, self.momentum, self.weight_decay = list(parameters), lr, momentum, weight_decay
        self.momenta = [torch.zeros_like(parameter) for parameter in self.parameters] if momentum else []

    @torch.no_grad()
    def step(self) -> None:
        trained = [i for i, parameter in enumerate(self.parameters) if parameter.grad is not None]
        torch._fused_sgd_(
            [self.parameters[i] for i in trained],
            [laid_out(self.parameters[i]) for i in trained],
            [self.momenta[i] for i in trained] if self.momenta else [],
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            lr=self.lr,  # type: ignore[arg-type]  # a number too: a tensor is one overload of two
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )

    def reset(self) -> None:
        for momentum in self.momenta:
            momentum.zero_()


class Fused:
    """An optimizer of PyTorch's whose fused kernel walks straight through memory."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = laid_out(parameter)
        self.optimizer.step()

    def reset(self) -> None:
        """As new, but at the same addresses."""
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()


def laid_out(parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient, lying in memory as it does. Autograd sees to that; a method that puts another gradient in
    its place may not."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)


def import_beforehand(config: Config) -> None:
    """What an optimizer other than `FusedSGD` would import with its first use, before workers begin or are forked."""
    if config.optimizer != "sgd":
        torch.optim.SGD([torch.zeros(1)])


def chosen(config: Config) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer that the configuration names, and its options but for the learning rate."""
    given = spec.parse(config.optimizer)
    entry = OPTIMIZERS.entry(given.name)
    options = entry.check_options(OPTIMIZERS.kind, given.options)
    takes = signature_of(entry.build).parameters
    return entry.build, options | {name: getattr(config, name) for name in OF_THE_RUN if name in takes}


def check(config: Config) -> None:
    """Refuse what is none, or cannot take a step with these options, before anything is read."""
    build, options = chosen(config)
    if build.__module__.startswith("torch.") and "(" not in config.optimizer:
        return  # as PyTorch made it: a trial would import all of its compiler
    parameter = nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.ones_like(parameter)
    try:
        build([parameter], lr=config.learning_rate, **options).step()
    except Exception as error:
        raise FedkeelError(f"The optimizer '{config.optimizer}' cannot take a step: {first_line(error)}.") from error


def uncapturable(config: Config) -> str:
    """Why steps of this optimizer cannot be replayed on a GPU, or nothing."""
    return "" if config.optimizer in FUSED else f"the optimizer '{config.optimizer}' asks the host in every step"


def local_optimizer(parameters: list[nn.Parameter], config: Config, learning_rate: float | Tensor) -> LocalOptimizer:
    """A new one. With a learning rate in a tensor a CUDA graph can hold its steps."""
    if config.optimizer == "sgd":
        return FusedSGD(parameters, learning_rate, config.momentum, config.weight_decay)
    build, options = chosen(config)
    if config.optimizer not in FUSED:
        return build(parameters, lr=learning_rate, **options)
    capturable = {"capturable": True} if isinstance(learning_rate, Tensor) else {}
    return Fused(build(parameters, lr=learning_rate, fused=True, **capturable, **options))
