"""Convolutions with scaled weight standardisation (Zhuang and Lyu, "FedWon", ICLR 2024, Eq. 3 and Listing 1).

Where normalisation layers are gone, standardised weights keep activations in range, and do not depend on the batch.
The papers have convolutions only. In a network without any, for vectors, the fully connected layers below its head are
standardised by the same formula, row by row: an extension of ours.
"""

import copy
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from fedkeel.core.types import Classifier
from fedkeel.errors import FedkeelError, MethodError, nearest
from fedkeel.nn.kernels.weights import can_standardise, standardise
from fedkeel.nn.surgery import replace_modules

EPS = 1e-4
INITS = ("xavier", "keep")
SAME = (  # arguments of a layer, or of a convolution, that its standardised kind takes over
    *("in_features", "out_features", "in_channels", "out_channels"),
    *("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"),
)


class _ScaledWS(nn.Module):
    """What all kinds share; used before torch's own class."""

    weight: Tensor
    bias: Any  # a tensor or None
    gain: nn.Parameter
    plain: type[nn.Module]
    own: nn.Module | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        nn.init.xavier_normal_(self.weight)
        self.gain = nn.Parameter(self.weight.new_ones(len(self.weight), *[1] * (self.weight.ndim - 1)))

    def standardised_weight(self) -> Tensor:
        """gain (W - mean) rsqrt(max(var N, 1e-4)) with unbiased variance over the fan-in N of an output channel.

        With a fan-in of one (a 1x1 convolution of single channels) there is no variance, and a weight minus its mean is
        zero: such a weight is used as it is, times the gain.
        """
        return standardised(self.weight, self.gain, torch.float32)

    def fold(self) -> nn.Module:
        """A plain layer (or one of the class that this one replaced) with the same outputs, for inference."""
        folded = self.plain(**_arguments(self)) if self.own is None else copy.deepcopy(self.own)
        folded.register_parameter("weight", nn.Parameter(self.standardised_weight().detach().to(self.weight.dtype)))
        folded.register_parameter("bias", None if self.bias is None else nn.Parameter(self.bias.detach().clone()))
        return folded.train(self.training)


class _ScaledWSConv(_ScaledWS, _ConvNd):
    """The 1d, 2d and 3d convolutions."""

    plain: type[_ConvNd]
    own: _ConvNd | None = None  # a convolution with a forward of its own, bare of its parameters

    def forward(self, x: Tensor) -> Tensor:
        weight = standardised(self.weight, self.gain, _wanted_type())
        out: Tensor
        if self.own is None:
            out = self._conv_forward(x, weight, self.bias)
        else:
            # Not as parameters: it borrows both for this call, and has nothing that could be trained or saved twice.
            self.own.__dict__.update(weight=weight, bias=self.bias)
            try:
                out = self.own(x)
            finally:
                del self.own.__dict__["weight"], self.own.__dict__["bias"]
        return out

    def like(self, old: _ConvNd) -> None:
        """Compute as `old` does if it has a way of its own, such as timm's padding to the size of the input."""
        if type(old).forward is self.plain.forward and type(old)._conv_forward is self.plain._conv_forward:
            return
        # In __dict__, out of nn.Module's sight: this is one convolution, not one with another inside.
        self.__dict__["own"] = own = copy.copy(old)
        own._parameters = {}


def standardised(weight: Tensor, gain: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype` if a single kernel does it, which saves the conversion; otherwise in the type of the weight."""
    if can_standardise(weight, gain):
        return standardise(weight, gain, EPS, dtype)
    fan_in = weight[0].numel()
    if fan_in == 1:
        return weight * gain
    var, mean = torch.var_mean(weight, dim=list(range(1, weight.ndim)), correction=1, keepdim=True)
    scale = torch.rsqrt((var * fan_in).clamp_min(EPS)) * gain
    return (weight - mean) * scale


def _wanted_type() -> torch.dtype:
    half = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") == torch.bfloat16
    return torch.bfloat16 if half else torch.float32


class ScaledWSConv1d(_ScaledWSConv, nn.Conv1d):
    """`nn.Conv1d` with scaled weight standardisation: see `ScaledWSConv2d`."""

    plain = nn.Conv1d


class ScaledWSConv2d(_ScaledWSConv, nn.Conv2d):
    """`nn.Conv2d` with scaled weight standardisation: FedWon Eq. 3 and Listing 1.

        W_hat = gain (W - mean) / sqrt(max(var N, 1e-4))

    mean and unbiased variance of an output channel over its fan-in N; `gain` is learnt, one for each output channel.
    Arguments and shapes are those of `nn.Conv2d`.

    >>> layer = ScaledWSConv2d(3, 8, 3)
    >>> layer(torch.zeros(1, 3, 9, 9)).shape, bool(layer.standardised_weight().sum((1, 2, 3)).abs().max() < 1e-5)
    (torch.Size([1, 8, 7, 7]), True)
    """

    plain = nn.Conv2d


class ScaledWSConv3d(_ScaledWSConv, nn.Conv3d):
    """`nn.Conv3d` with scaled weight standardisation: see `ScaledWSConv2d`."""

    plain = nn.Conv3d


class ScaledWSLinear(_ScaledWS, nn.Linear):
    """`nn.Linear` with scaled weight standardisation of its rows, for networks on vectors: see `ScaledWSConv2d`."""

    plain = nn.Linear

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, standardised(self.weight, self.gain, _wanted_type()), self.bias)


KINDS: dict[type[nn.Module], Any] = {
    nn.Conv1d: ScaledWSConv1d,
    nn.Conv2d: ScaledWSConv2d,
    nn.Conv3d: ScaledWSConv3d,
    nn.Linear: ScaledWSLinear,
}


def to_scaled_ws(model: nn.Module, skip: Collection[str] = (), init: str = "xavier", gain: float = 1.0) -> list[str]:
    """Replace every convolution by its scaled weight-standardised kind, in place; returns the names of the layers.

    `skip` names convolutions that stay plain (FedWon's AlexNet: "encoder.conv3"). `init`: "xavier" draws new weights as
    Listing 1 does; "keep" keeps those of the model, e.g. pretrained ones. A subclass with a forward of its own (timm's
    convolutions with "same" padding) goes on computing its own way, with standardised weights. Transposed convolutions
    stay plain: their weights are laid out by input channel. `gain` is where the learnable gains start. Of a network
    without convolutions, the fully connected layers are replaced, but for its head.

    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> to_scaled_ws(model), type(model[0]).__name__
    (['0'], 'ScaledWSConv2d')
    """
    if init not in INITS:
        raise FedkeelError(f"to_scaled_ws has no init '{init}': {nearest(str(init), INITS)}")
    layers = _standardisable(model)
    for name in skip:
        if name not in layers:
            raise FedkeelError(f"skip names '{name}', which is no convolution here: {nearest(name, layers)}")

    def build(_: str, old: nn.Module) -> nn.Module:
        assert isinstance(old, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear)
        kind = next(kind for plain, kind in KINDS.items() if isinstance(old, plain))
        new: Any = kind(**_arguments(old))
        if isinstance(old, _ConvNd):
            new.like(old)
        with torch.no_grad():
            new.gain.fill_(gain)
            if init == "keep":
                new.weight.copy_(old.weight)
            if old.bias is not None and new.bias is not None:
                new.bias.copy_(old.bias)
        return new  # type: ignore[no-any-return]

    names = replace_modules(model, lambda name, _: name in layers and name not in skip, build)
    if not names and not any(isinstance(module, _ScaledWS) for module in model.modules()):
        raise MethodError(f"{type(model).__name__} has no convolution to standardise: choose another model.")
    return names


def _standardisable(model: nn.Module) -> list[str]:
    """The names of the convolutions that are plain yet; without any, of the fully connected layers below the head."""
    plain = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, tuple(KINDS)) and not isinstance(module, _ScaledWS)
    }
    convolutions = [name for name, module in plain.items() if isinstance(module, _ConvNd)]
    if not isinstance(model, Classifier) or any(isinstance(module, _ConvNd) for module in model.modules()):
        return convolutions
    head = set(model.head.modules())
    return [name for name, module in plain.items() if module not in head]


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

    def build(_: str, old: nn.Module) -> nn.Module:
        assert isinstance(old, _ScaledWS)
        return old.fold()

    replace_modules(folded, lambda _, module: isinstance(module, _ScaledWS), build)
    return folded


def _arguments(layer: Any) -> dict[str, Any]:
    return {name: getattr(layer, name) for name in SAME if hasattr(layer, name)} | {
        "bias": layer.bias is not None,
        "device": layer.weight.device,
        "dtype": layer.weight.dtype,
    }
