"""Change what a model is made of, for good or for the length of a `with` block.

For good: replace modules, put other normalisations in. That is done once, in place, before training, and the same on
server and clients, so names and shapes agree everywhere.

For a block: which statistics the batch norms normalise with. Each block takes a model, or what `batch_norms(model)`
returned, which spares the search at every step. Nothing is copied and the device is not waited for: a block only
changes attributes of the layers, so it can be captured in a CUDA graph, nested, and left by an exception. Batch norms
without running statistics (`track_running_stats=False`) go on using those of the batch. Under `using_statistics` and
`frozen_statistics`, gradients flow to the input and to the affine parameters; the statistics must not change between
such a forward and its backward.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedkeel.core.state import BatchNorm, batch_norms, moment_names
from fedkeel.errors import FedkeelError, MethodError

InstanceNorm = nn.InstanceNorm1d | nn.InstanceNorm2d | nn.InstanceNorm3d
NORMALISATIONS = (BatchNorm, nn.GroupNorm, nn.LayerNorm, InstanceNorm)
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | Transposed


def replace_modules(
    model: nn.Module, match: Callable[[str, nn.Module], bool], build: Callable[[str, nn.Module], nn.Module]
) -> list[str]:
    """Replace every submodule for which `match(name, module)` holds by `build(name, module)`, in place.

    A module that is used in two places is built once and stays one object. What `build` returns is not searched
    again. Returns the names of what was replaced.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> replace_modules(model, lambda name, module: isinstance(module, nn.ReLU), lambda name, module: nn.GELU())
    ['1']
    """
    if match("", model):
        raise FedkeelError(f"The {type(model).__name__} itself is to be replaced: put it inside a module first.")
    built: dict[nn.Module, nn.Module] = {}
    names: list[str] = []
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if any(name.startswith(f"{replaced}.") for replaced in names):
            continue
        if module not in built and match(name, module):
            built[module] = build(name, module).train(module.training)
        if module in built:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, built[module])
            names.append(name)
    return names


def change_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Have a module get `change(x)` for x. A hook and no module: names in `state_dict()` stay those of the network."""
    module.register_forward_pre_hook(partial(_on_input, change))


def change_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Have a module give `change(y)` for y, likewise."""
    module.register_forward_hook(partial(_on_output, change))


# Not closures: the copy of a model must call its own copy of `change`.
def _on_input(change: Callable[[Tensor], Tensor], _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return change(args[0]), *args[1:]


def _on_output(change: Callable[[Tensor], Tensor], _: nn.Module, __: tuple[Any, ...], output: Tensor) -> Tensor:
    return change(output)


def group_count(channels: int, groups: int) -> int:
    """How many groups a layer of `channels` gets when `groups` are asked for.

    FedWon (appendix A.2) takes 32, 8 below 32 channels, and 24 for 144 channels; HBN takes 2 everywhere. Where the
    number does not divide the channels, the largest divisor below it is taken.
    """
    if groups == 32:
        groups = 24 if channels == 144 else 8 if channels < 32 else 32
    return next(count for count in range(min(groups, channels), 0, -1) if channels % count == 0)


def to_group_norm(model: nn.Module, groups: int | Callable[[str, int], int] = 32) -> list[str]:
    """Replace every batch norm by a group norm with the same affine parameters; returns the names of the layers.

    `groups` is 1 for the papers' layer norm, HBN's 2, FedWon's 32 (see `group_count`), or a function of a layer's name
    and channels, for tables such as FedWon's own for its AlexNet, where later layers have 64.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> to_group_norm(model, groups=2), model[1].num_groups
    (['1'], 2)
    """

    def build(name: str, norm: BatchNorm) -> nn.Module:
        channels = norm.num_features
        count = group_count(channels, groups(name, channels) if callable(groups) else groups)
        if isinstance(norm, nn.BatchNorm1d) and count == channels > 1:
            # On vectors (N, C), a group of one channel is one number, and normalised it is zero whatever it was.
            count = group_count(channels, channels // 2)
        return nn.GroupNorm(count, channels, eps=norm.eps, affine=norm.affine)

    return replace_batch_norms(model, build, "group norm")


def remove_normalisation(model: nn.Module) -> list[str]:
    """Remove every batch, group, layer and instance norm (FedWon); `HybridBatchNorm` stays, for `fedwon+hbn`.

    A convolution that had no bias, because the shift of the normalisation after it made one pointless, gets a bias of
    zeros: the convolutions of FedWon's Listing 1 have one, and the network would lose its shifts otherwise.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8))
    >>> remove_normalisation(model), model[1], model[0].bias.shape
    (['1'], Identity(), torch.Size([8]))
    """
    names = replace_modules(
        model,
        lambda _, module: isinstance(module, NORMALISATIONS),
        lambda _, norm: _with_tail(norm, nn.Identity()),
    )
    for module in model.modules() if names else ():
        if isinstance(module, Convolution) and module.bias is None:
            module.bias = nn.Parameter(module.weight.new_zeros(module.out_channels))
    return names


def _with_tail(old: nn.Module, new: nn.Module) -> nn.Module:
    """The new layer followed by the old one's own submodules: timm's norms carry their activation inside them."""
    tail = [child for child in old.children() if not isinstance(child, nn.Identity)]
    return nn.Sequential(new, *tail) if tail else new


def replace_batch_norms(model: nn.Module, build: Callable[[str, BatchNorm], nn.Module], by: str) -> list[str]:
    """Replace every batch norm by what `build` makes of it, with the same scale, shift and running statistics, where it
    has them; returns the names."""

    @torch.no_grad()
    def build_alike(name: str, norm: nn.Module) -> nn.Module:
        assert isinstance(norm, BatchNorm)
        new = build(name, norm)
        for entry in ("weight", "bias", *moment_names("")):
            source, target = getattr(norm, entry), getattr(new, entry, None)
            if source is not None and target is not None:
                new.to(source)  # its device and type
                getattr(new, entry).copy_(source).requires_grad_(source.requires_grad)
        return _with_tail(norm, new)

    names = replace_modules(model, lambda _, module: isinstance(module, BatchNorm), build_alike)
    if not names:
        raise MethodError(f"{type(model).__name__} has no batch norm that {by} could replace: choose another model.")
    return names


# -- for the length of a block -----------------------------------------------------------------------------------------
Norms = Mapping[str, BatchNorm]
Change = tuple[nn.Module, str, Any]


@contextmanager
def changed(changes: Iterable[Change]) -> Iterator[None]:
    """Inside, the attribute `name` of a module is `value`, for each (module, name, value); afterwards as it was."""
    before: list[Change] = []
    try:
        for module, name, value in changes:
            before.append((module, name, getattr(module, name)))
            setattr(module, name, value)
        yield
    finally:
        for change in reversed(before):
            setattr(*change)


def using_statistics(model: nn.Module | Norms, statistics: Mapping[str, Tensor]) -> AbstractContextManager[None]:
    """Inside, every batch norm normalises with the given means and variances, in training too (GReg Eq. 5).

    `statistics` has the names of `state_dict()`, e.g. "encoder.bn1.running_mean"; a layer that is not in it uses its
    own running ones. Running statistics are not updated.

    >>> model = nn.Sequential(nn.BatchNorm1d(1, eps=0))
    >>> with using_statistics(model, {"0.running_mean": torch.tensor([4.0]), "0.running_var": torch.tensor([4.0])}):
    ...     model(torch.tensor([[6.0], [8.0]])).flatten().tolist()
    [1.0, 2.0]
    """
    norms = _norms(model)
    given: list[Change] = []
    for name, norm in norms.items():
        for entry, buffer in zip(moment_names(name), moment_names(""), strict=True):
            if entry in statistics:
                given += [(norm, buffer, statistics[entry]), (norm, "training", False)]
    if statistics and norms and not given:
        raise MethodError(
            f"None of the given statistics belongs to a batch norm of this model (e.g. '{next(iter(statistics))}'): "
            "give them under the names of its state_dict()."
        )
    return changed(_frozen(norms) + given)


def frozen_statistics(model: nn.Module | Norms) -> AbstractContextManager[None]:
    """Inside, batch norms use their running statistics and do not update them; all else trains (FedCoda, FixBN).

    >>> model = nn.Sequential(nn.BatchNorm1d(1, eps=0)).train()  # running statistics (0, 1)
    >>> with frozen_statistics(model):
    ...     model(torch.tensor([[6.0], [8.0]])).flatten().tolist()
    [6.0, 8.0]
    """
    return changed(_frozen(_norms(model)))


def _frozen(norms: Norms) -> list[Change]:
    return [(norm, "training", False) for norm in norms.values() if norm.running_mean is not None]


def batch_statistics(model: nn.Module | Norms) -> AbstractContextManager[None]:
    """Inside, batch norms use the statistics of the batch and do not update the running ones (GReg Table 1).

    The rest of the model stays in the mode it is in, e.g. evaluation; there a `HybridBatchNorm` uses the batch's
    alone too. As in training, a batch must have more than one value per channel.

    >>> model = nn.Sequential(nn.BatchNorm1d(1, eps=1e-9)).eval()
    >>> with batch_statistics(model):
    ...     model(torch.tensor([[6.0], [8.0]])).flatten().tolist()
    [-1.0, 1.0]
    """
    modules = model.modules() if isinstance(model, nn.Module) else model.values()
    changes: list[Change] = [(m, "tested_by_batch", True) for m in modules if hasattr(m, "tested_by_batch")]
    for norm in _norms(model).values():
        changes += [(norm, "training", True), (norm, "track_running_stats", False)]
    return changed(changes)


def _norms(model: nn.Module | Norms) -> Norms:
    return batch_norms(model) if isinstance(model, nn.Module) else model
