"""Local optimizers: PyTorch's own by name, `--optimizer 'adam(betas=(0.9, 0.99))'`; the usual ones made so that a step
costs little. `OPTIMIZERS.register("name")` above a class derived from `torch.optim.Optimizer` adds one.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedkeel import spec
from fedkeel.config import Config
from fedkeel.errors import FedkeelError, first_line
from fedkeel.registry import Registry, signature_of

OF_THE_RUN = {"lr": "learning_rate", "momentum": "momentum", "weight_decay": "weight_decay"}
OF_THE_KERNEL = ("lr", "momentum", "weight_decay", "dampening", "nesterov", "maximize")
OF_THE_ENGINE = ("params", "foreach", "fused", "capturable", "differentiable", "maximize")
UNFIT = {
    "lbfgs": "evaluates the loss several times in a step",
    "sparseadam": "wants sparse gradients",
    "muon": "takes matrices alone",
}
OPTIMIZERS: Registry[torch.optim.Optimizer] = Registry("optimizer", given=(*OF_THE_RUN, *OF_THE_ENGINE))
for _name, _class in sorted(vars(torch.optim).items()):
    if inspect.isclass(_class) and _name != "Optimizer" and _name.lower() not in UNFIT:
        OPTIMIZERS.register(_name.lower())(_class)


class DirectSGD(torch.optim.SGD):
    """`torch.optim.SGD(fused=True)` for the CPU with the same kernel and the same numbers, called at once.

    PyTorch's `step` sorts parameters by device and type anew every time. For a small network that takes longer than
    the arithmetic.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=True)
        self._momenta: dict[nn.Parameter, Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            # A parameter's first momentum is its gradient, which the kernel sees to for all of them or for none.
            for begins in (False, True):
                if parameters := [parameter for parameter in trained if (parameter not in self._momenta) is begins]:
                    self._update(parameters, group, begins)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any], begins: bool) -> None:
        momenta: list[Tensor] = []
        if group["momentum"]:
            if begins:
                for parameter in parameters:
                    self._momenta[parameter] = self.state[parameter]["momentum_buffer"] = torch.empty_like(parameter)
            momenta = [self._momenta[parameter] for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        options = {name: group[name] for name in OF_THE_KERNEL}
        torch._fused_sgd_(list[Tensor](parameters), gradients, momenta, **options, is_first_step=begins)


DirectSGD.step.hooked = True  # type: ignore[attr-defined]  # PyTorch would wrap every step in a label for its profiler
# Around it is what hides it from PyTorch's compiler, and imports the compiler for that: two seconds.
DirectSGD.add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)  # type: ignore[method-assign]


def import_beforehand(config: Config) -> None:
    """What an optimizer other than `DirectSGD` would import with its first use, before workers begin or are forked."""
    if config.optimizer != "sgd":
        torch.optim.SGD([torch.zeros(1)])


def chosen(config: Config) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """The optimizer that the configuration names, and its options but for the learning rate."""
    given = spec.parse(config.optimizer)
    if reason := UNFIT.get(given.name.lower()):
        raise FedkeelError(f"The optimizer '{given.name}' {reason}: choose another, see 'fedkeel list optimizers'.")
    entry = OPTIMIZERS.entry(given.name)
    for name in given.options.keys() & OF_THE_RUN:
        option = OF_THE_RUN[name]
        raise FedkeelError(
            f"'{name}' is an option of the run: give '--{option.replace('_', '-')}', in Python {option}=."
        )
    options = entry.check_options(OPTIMIZERS.kind, given.options)
    takes = signature_of(entry.build).parameters
    return entry.build, options | {
        name: getattr(config, name) for name in ("momentum", "weight_decay") if name in takes
    }


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
    build, options = chosen(config)
    if build is torch.optim.SGD and not options.get("dampening"):  # which the first step is without
        return ""
    is_made_for_it = "capturable" in signature_of(build).parameters and hasattr(build, "_init_group")
    return "" if is_made_for_it else f"the optimizer '{config.optimizer}' asks the host in every step"


def local_optimizer(
    parameters: list[nn.Parameter], config: Config, learning_rate: float | Tensor
) -> torch.optim.Optimizer:
    """A new one. With a learning rate in a tensor a CUDA graph can hold it: its state is made beforehand."""
    resident = isinstance(learning_rate, Tensor)
    if config.optimizer == "sgd" and not isinstance(learning_rate, Tensor):
        return DirectSGD(parameters, learning_rate, config.momentum, config.weight_decay)
    build, options = chosen(config)
    is_sgd = build is torch.optim.SGD
    if config.optimizer == "adamw" or (resident and is_sgd):
        options["fused"] = True
    if resident and not is_sgd:
        options["capturable"] = True
    made = build(parameters, lr=learning_rate, **options)
    if resident and not is_sgd:
        _begin(made)
    for parameter in parameters if resident and is_sgd and config.momentum else ():
        made.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return made


def _begin(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that PyTorch would make in the first step."""
    for group in optimizer.param_groups:
        gradients = [parameter.grad for parameter in group["params"]]
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
        init: Callable[..., Any] = optimizer._init_group  # type: ignore[attr-defined]
        init(group, *([] for _ in list(inspect.signature(init).parameters)[1:]))
        for parameter, gradient in zip(group["params"], gradients, strict=True):
            parameter.grad = gradient


def reset(optimizer: torch.optim.Optimizer) -> None:
    """As new, but at the same addresses. A momentum of zeros gives the same first step as none."""
    if isinstance(optimizer, torch.optim.SGD | torch.optim.AdamW):
        values = [value for entries in optimizer.state.values() for value in entries.values()]
        if tensors := [value for value in values if isinstance(value, Tensor)]:
            torch._foreach_zero_(tensors)
        return
    # The state of others begins with other numbers too, some of them that of the learning rate.
    held = dict(optimizer.state)
    optimizer.state.clear()
    _begin(optimizer)
    for parameter, entries in held.items():
        for name, value in optimizer.state[parameter].items():
            entries[name].copy_(value)
        optimizer.state[parameter] = entries


def lay_out_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Fused optimizers on the CPU walk straight through memory, so a gradient must lie as its parameter does. Autograd
    sees to that; a method that puts another gradient in its place may not."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        gradient = parameter.grad
        if gradient is not None and gradient.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
