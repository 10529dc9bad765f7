"""What a tensor of a model *is*, and arithmetic over named tensors that respects it.

Averaging a `state_dict()` as if all of it were weights is the field's oldest mistake: integer counters turn
into fractions, running variances get optimiser steps. Here every entry has a role, and its role decides what
may happen to it.
"""

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Layout", "Role", "Tensors", "add", "batch_norms", "load", "moment_names", "nbytes", "roles", "subtract"]

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
"""Every batch norm of PyTorch's, and what is derived from one."""
Tensors = dict[str, Tensor]
"""Tensors by their names, as in `state_dict()`."""


class Role(str, Enum):
    """What an entry of `state_dict()` is: see `roles`.

    Attributes:
        WEIGHT: learnable; travels; sample-weighted mean on the server.
        STATISTIC: running mean or variance of a normalisation layer; travels; a method may replace its rule.
        COUNTER: an integer such as `num_batches_tracked`; travels; maximum, never a mean.
        LOCAL: what the method keeps on the client; never travels.
    """

    WEIGHT = "weight"
    STATISTIC = "statistic"
    COUNTER = "counter"
    LOCAL = "local"


def roles(model: nn.Module, method: Any = None) -> dict[str, Role]:
    """The role of every entry of `model.state_dict()`, in its order; what `method.kept` names is LOCAL.

    >>> {name: role.value for name, role in roles(nn.BatchNorm1d(1, affine=False)).items()}
    {'running_mean': 'statistic', 'running_var': 'statistic', 'num_batches_tracked': 'counter'}
    """
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    local = set() if method is None else {*method.kept}
    result: dict[str, Role] = {}
    for name, tensor in model.state_dict().items():
        if name in local:
            result[name] = Role.LOCAL
        elif name in parameters:
            result[name] = Role.WEIGHT
        elif is_continuous(tensor):
            result[name] = Role.STATISTIC
        else:
            result[name] = Role.COUNTER
    return result


def batch_norms(model: nn.Module) -> dict[str, BatchNorm]:
    """Every batch norm of torch's kind (1d, 2d, 3d, Sync, Lazy, subclasses) by its name in `named_modules()`.

    A module that is used in two places appears once. `HybridBatchNorm` is none of these.

    >>> list(batch_norms(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
    ['1']
    """
    return {name: module for name, module in model.named_modules() if isinstance(module, BatchNorm)}


def moment_names(layer: str) -> tuple[str, str]:
    """What `state_dict()` calls the running mean and variance of a layer.

    >>> moment_names("encoder.bn1")
    ('encoder.bn1.running_mean', 'encoder.bn1.running_var')
    """
    prefix = f"{layer}." if layer else ""
    return f"{prefix}running_mean", f"{prefix}running_var"


def is_variance(name: str) -> bool:
    """Whether a statistic of this name must never be negative."""
    leaf = name.rpartition(".")[2]
    return leaf == "var" or (leaf.endswith("_var") and not leaf.endswith("log_var"))


def is_continuous(tensor: Tensor) -> bool:
    """Whether a mean of such tensors makes sense; of integers and truth values it does not."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def untouched(statistics: Mapping[str, Tensor]) -> bool:
    """Whether all of these running statistics are (0, 1), as of a network that has seen no data."""
    # One after another: after the first round the first one says it, and a GPU is asked once.
    return all(bool((t == (1 if is_variance(name) else 0)).all()) for name, t in statistics.items())


class Layout:
    """The roles of one model, with the names of each kind ready at hand: see `roles`."""

    def __init__(self, role_of: Mapping[str, Role]) -> None:
        self.role_of = dict(role_of)
        self.weights = [name for name, role in role_of.items() if role is Role.WEIGHT]
        self.statistics = [name for name, role in role_of.items() if role in (Role.STATISTIC, Role.COUNTER)]
        self.local = [name for name, role in role_of.items() if role is Role.LOCAL]

    def extract(self, model: nn.Module, names: Iterable[str]) -> Tensors:
        """Copies of the named entries, detached, on the model's device."""
        return copies(model.state_dict(), names)


@torch.no_grad()
def copies(entries: Mapping[str, Tensor], names: Iterable[str]) -> Tensors:
    """Copies of the named entries, all in one go."""
    result = {name: torch.empty_like(entries[name], requires_grad=False) for name in names}
    _copy_all(list(result.values()), [entries[name] for name in result])
    return result


@torch.no_grad()
def load(entries: nn.Module | Mapping[str, Tensor], *groups: Mapping[str, Tensor]) -> None:
    """Copy named tensors into a model, or into its entries, in place: optimisers and captured graphs keep their
    pointers. A later group overrides an earlier one.

    >>> model = nn.Linear(1, 1)
    >>> load(model, {"weight": torch.tensor([[2.0]])})
    >>> model.weight.item()
    2.0
    """
    if isinstance(entries, nn.Module):
        entries = entries.state_dict(keep_vars=True)
    given = {name: tensor for group in groups for name, tensor in group.items()}
    _copy_all([entries[name] for name in given], list(given.values()))


def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """One call for each dtype: lists of mixed ones are copied tensor by tensor, which on a GPU takes far longer."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        ours, theirs = by_dtype.setdefault(target.dtype, ([], []))
        ours.append(target)
        theirs.append(source)
    for ours, theirs in by_dtype.values():
        torch._foreach_copy_(ours, theirs, non_blocking=True)


def to_device(tensors: Mapping[str, Tensor], device: torch.device | str) -> Tensors:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def clone(tensors: Mapping[str, Tensor]) -> Tensors:
    """Copies of all of them, detached.

    >>> clone({"w": torch.ones(1, requires_grad=True)})
    {'w': tensor([1.])}
    """
    return copies(tensors, tensors)


def select(tensors: Tensors, part: str) -> Tensors:
    """The tensors named `part/...`, without that prefix."""
    prefix = f"{part}/"
    return {name[len(prefix) :]: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def prefixed(tensors: Tensors, part: str) -> Tensors:
    """The inverse of `select`."""
    return {f"{part}/{name}": tensor for name, tensor in tensors.items()}


def subtract(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Tensors:
    """left - right, entry by entry.

    >>> subtract({"w": torch.tensor(5.0)}, {"w": torch.tensor(3.0)})
    {'w': tensor(2.)}
    """
    return {name: tensor - right[name] for name, tensor in left.items()}


def add(left: Mapping[str, Tensor], right: Mapping[str, Tensor], scale: float = 1.0) -> Tensors:
    """left + scale * right, entry by entry.

    >>> add({"w": torch.tensor(5.0)}, {"w": torch.tensor(3.0)}, scale=2)
    {'w': tensor(11.)}
    """
    return {name: tensor + scale * right[name] for name, tensor in left.items()}


def keep_variances_positive(statistics: Tensors) -> Tensors:
    """Clamp every variance at zero: no server rule may leave one negative."""
    return {name: t.clamp(min=0) if is_variance(name) else t for name, t in statistics.items()}


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that these tensors take on the wire.

    >>> nbytes({"w": torch.zeros(10), "n": torch.zeros((), dtype=torch.int64)})
    48
    """
    return sum(tensor.nbytes for tensor in tensors.values())
