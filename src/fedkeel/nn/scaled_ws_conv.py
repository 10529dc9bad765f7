"""Convolutions with scaled weight standardisation (Zhuang and Lyu, "FedWon", ICLR 2024, Eq. 3 and Listing 1).

Where normalisation layers are gone, standardised weights keep activations in range, and do not depend on the batch.
The paper has convolutions only. In a network without any, for vectors, the fully connected layers below its head are
standardised by the same formula, row by row: an extension of ours.
"""

import copy
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fedkeel.core.types import Classifier
from fedkeel.errors import FedkeelError, MethodError, nearest
from fedkeel.nn.kernels.weights import can_standardise, standardise
from fedkeel.nn.surgery import replace_modules

EPS = 1e-4
SAME = (  # arguments of a layer that its standardised kind takes over
    *("in_features", "out_features", "in_channels", "out_channels"),
    *("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"),
)


class _ScaledWS(nn.Module):
    """What both kinds share; used before torch's own class."""

    weight: Tensor
    bias: Any  # a tensor or None
    gain: nn.Parameter
    plain: type[nn.Module]
    # One that computes in another way than F.conv2d: that pads with something else than zeros, or is of a class of its
    # own, such as timm's. It has no numbers and no bias. In a tuple, out of nn.Module's sight.
    own: tuple[Any, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        nn.init.xavier_normal_(self.weight)
        self.gain = nn.Parameter(self.weight.new_ones(len(self.weight), *[1] * (self.weight.ndim - 1)))
        if getattr(self, "padding_mode", "zeros") != "zeros":
            self.like(self.plain(**_arguments(self) | {"device": "meta"}))

    def standardised_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """gain (W - mean) rsqrt(max(var N, 1e-4)) with unbiased variance over the fan-in N of an output channel.

        With a fan-in of one (a 1x1 convolution of single channels) there is no variance, and a weight minus its mean is
        zero: such a weight is used as it is, times the gain. `dtype` is what a single kernel may give at once, which
        saves the conversion.
        """
        if can_standardise(self.weight, self.gain):
            return standardise(self.weight, self.gain, EPS, dtype)
        fan_in = self.weight[0].numel()
        if fan_in == 1:
            return self.weight * self.gain
        axes = list(range(1, self.weight.ndim))
        var, mean = torch.var_mean(self.weight, dim=axes, correction=1, keepdim=True)
        scale = torch.rsqrt((var * fan_in).clamp_min(EPS)) * self.gain
        return (self.weight - mean) * scale

    def forward(self, x: Tensor) -> Tensor:
        half = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
        weight = self.standardised_weight(torch.bfloat16 if half else torch.float32)
        if self.own:
            out: Tensor = functional_call(self.own[0], {"weight": weight}, (x,))
            return out if self.bias is None else out + self.bias.view(-1, 1, 1)
        return self.apply_to(x, weight)

    def apply_to(self, x: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError

    def fold(self) -> nn.Module:
        """A plain layer (or one of the class that this one replaced) with the same outputs, for inference."""
        folded: Any = copy.deepcopy(self.own[0]) if self.own else self.plain(**_arguments(self))
        folded.weight = nn.Parameter(self.standardised_weight().detach().to(self.weight.dtype))
        folded.bias = None if self.bias is None else nn.Parameter(self.bias.detach().clone())
        return folded.train(self.training)  # type: ignore[no-any-return]

    def like(self, old: nn.Module) -> None:
        """Compute as `old` does, with weights of this layer."""
        own: Any = copy.deepcopy(old).to("meta")
        own.bias = None
        self.own = (own,)


class ScaledWSConv2d(_ScaledWS, nn.Conv2d):
    """`nn.Conv2d` with scaled weight standardisation: FedWon Eq. 3 and Listing 1.

        W_hat = gain (W - mean) / sqrt(max(var N, 1e-4))

    mean and unbiased variance of an output channel over its fan-in N; `gain` is learnt, one for each output channel.
    Arguments and shapes are those of `nn.Conv2d`.

    >>> layer = ScaledWSConv2d(3, 8, 3)
    >>> layer(torch.zeros(1, 3, 9, 9)).shape, bool(layer.standardised_weight().sum((1, 2, 3)).abs().max() < 1e-5)
    (torch.Size([1, 8, 7, 7]), True)
    """

    plain = nn.Conv2d

    def apply_to(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class ScaledWSLinear(_ScaledWS, nn.Linear):
    """`nn.Linear` with scaled weight standardisation of its rows, for networks on vectors: see `ScaledWSConv2d`."""

    plain = nn.Linear

    def apply_to(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight, self.bias)


def to_scaled_ws(model: nn.Module, skip: Collection[str] = (), init: str = "xavier", gain: float = 1.0) -> list[str]:
    """Replace every convolution by its scaled weight-standardised kind, in place; returns the names of the layers.

    `skip` names convolutions that stay plain (FedWon's AlexNet: "encoder.conv3"). `init`: "xavier" draws new weights as
    Listing 1 does; "keep" keeps those of the model, e.g. pretrained ones. A subclass with a forward of its own (timm's
    convolutions with "same" padding) goes on computing its own way, with standardised weights. `gain` is where the
    learnable gains start. Of a network without convolutions, the fully connected layers are replaced, but for its head.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> to_scaled_ws(model), type(model[0]).__name__
    (['0'], 'ScaledWSConv2d')
    """
    wanted: Any = nn.Conv2d
    head: set[nn.Module] = set()
    if isinstance(model, Classifier) and not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        wanted, head = nn.Linear, {*model.head.modules()}
    known = head | {module for module in model.modules() if isinstance(module, _ScaledWS)}
    layers = [name for name, m in model.named_modules() if isinstance(m, wanted) and m not in known]
    for name in skip:
        if name not in layers:
            raise FedkeelError(f"skip names '{name}', which is no convolution here: {nearest(name, layers)}")

    @torch.no_grad()
    def build(_: str, old: Any) -> nn.Module:
        new: Any = (ScaledWSConv2d if wanted is nn.Conv2d else ScaledWSLinear)(**_arguments(old))
        if type(old) is not new.plain:
            new.like(old)
        new.gain.fill_(gain)
        if init == "keep":
            new.weight.copy_(old.weight)
        if old.bias is not None:
            new.bias.copy_(old.bias)
        return new  # type: ignore[no-any-return]

    names = replace_modules(model, lambda name, _: name in layers and name not in skip, build)
    if not names and known == head:
        raise MethodError(f"{type(model).__name__} has no convolution to standardise: choose another model.")
    return names


def fold(model: nn.Module) -> nn.Module:
    """A copy of the model with plain layers and the same outputs: nothing is left to standardise at inference.

    >>> model = nn.Sequential(ScaledWSConv2d(3, 8, 3))
    >>> x, plain = torch.rand(1, 3, 9, 9), fold(model)
    >>> type(plain[0]).__name__, torch.allclose(plain(x), model(x), atol=1e-6)
    ('Conv2d', True)
    """
    if isinstance(model, _ScaledWS):
        return model.fold()
    folded = copy.deepcopy(model)
    replace_modules(folded, lambda _, module: isinstance(module, _ScaledWS), lambda _, layer: layer.fold())  # type: ignore[operator]
    return folded


def _arguments(layer: Any) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in SAME if hasattr(layer, name)} | {
        "bias": layer.bias is not None,
        "device": layer.weight.device,
        "dtype": layer.weight.dtype,
    }
