"""Local optimizers: PyTorch's own, made so that a step costs little."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedkeel.config import Config


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
                parameters = [parameter for parameter in trained if (parameter not in self._momenta) is begins]
                if parameters:
                    self._update(parameters, group, begins)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any], begins: bool) -> None:
        momenta: list[Tensor] = []
        if group["momentum"]:
            if begins:
                for parameter in parameters:
                    self._momenta[parameter] = self.state[parameter]["momentum_buffer"] = torch.empty_like(parameter)
            momenta = [self._momenta[parameter] for parameter in parameters]
        torch._fused_sgd_(
            list[Tensor](parameters),
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            momenta,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=begins,
        )


DirectSGD.step.hooked = True  # type: ignore[attr-defined]  # PyTorch would wrap every step in a label for its profiler


def local_optimizer(
    parameters: list[nn.Parameter], config: Config, learning_rate: float | Tensor
) -> torch.optim.Optimizer:
    """A new one. With a learning rate in a tensor a CUDA graph can hold it: its state is made beforehand."""
    resident, decay = isinstance(learning_rate, Tensor), config.weight_decay
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=decay, fused=True, capturable=resident)
    if not isinstance(learning_rate, Tensor):
        return DirectSGD(parameters, learning_rate, config.momentum, decay)
    sgd = torch.optim.SGD(parameters, lr=learning_rate, momentum=config.momentum, weight_decay=decay, fused=True)
    for parameter in parameters if config.momentum else ():
        sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    return sgd


def reset(optimizer: torch.optim.Optimizer) -> None:
    """As new, but at the same addresses. A momentum of zeros gives the same first step as none."""
    values = [value for entries in optimizer.state.values() for value in entries.values()]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if tensors:
        torch._foreach_zero_(tensors)


def lay_out_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Fused optimizers on the CPU walk straight through memory, so a gradient must lie as its parameter does. Autograd
    sees to that; a method that puts another gradient in its place may not."""
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        gradient = parameter.grad
        if gradient is not None and gradient.stride() != parameter.stride():
            parameter.grad = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
