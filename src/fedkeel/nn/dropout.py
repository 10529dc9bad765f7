"""Dropout whose masks are those of (seed, round, client, draw), on every device and inside CUDA graphs too.

torch's layers draw from its default generator, of which there is one for each device: clients that run side by side on
a GPU would share it, and their masks would depend on who came first. So `draw_dropout` gives every layer of a model
that drops something the numbers of `nn.draws` instead. The layers stay the same objects with the same names, hooks and
options; only their class changes, and `plain_dropout` changes it back.

One key for the client and one counter for the model: each draw takes the next number, as from a generator. So a layer
that is used twice in a forward drops other values each time, and so does every further forward of a step (GReg's second
one, that of a sharpness-aware step), as in plain PyTorch. A mask belongs to the positions of its tensor, however that
lies in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.errors import FedkeelError
from fedkeel.nn.draws import mixed_keys, new_key, uniform

HOLDER = "dropout_draws"  # the name of the `Draws` in a model; it adds nothing to `state_dict()`
_ALPHA = 1.7580993408473766  # minus the limit of SELU at minus infinity (Klambauer et al., NeurIPS 2017)


class Draws(nn.Module):
    """The key of a client and the number of draws so far: what all masks of one model come from."""

    key: Tensor
    counter: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("key", "counter"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64), persistent=False)
        self.unfused: list[nn.Module] = []  # attentions whose fused kernel would draw by itself

    def forward(self, x: Any) -> Any:
        return x  # in a model that calls its parts one after another

    def begin(self, generator: torch.Generator) -> None:
        """Masks from here on are those of this generator."""
        self.key.copy_(new_key(generator))
        self.counter.zero_()

    # The compiler would compute masks again in the backward pass, from a counter that has gone on. It is not
    # `torch.compiler.disable`, which imports the compiler at once.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def keep(self, shape: tuple[int, ...], p: float) -> Tensor:
        """Which entries stay, each with probability 1 - p: bool, of the given shape."""
        if torch._C._current_graph_task_id() != -1:
            raise FedkeelError(
                "A dropout layer runs again during the backward pass, where its mask would be another one: switch "
                "gradient checkpointing off."
            )
        numbers = uniform(self.key, self.counter, math.prod(shape)).view(shape)
        self.counter.add_(1)
        return numbers >= p

    def of_samples(self, count: int) -> dict[str, Tensor]:
        """Key and counter for each of `count` samples that go through the model one by one, by their names in it."""
        keys = mixed_keys(self.key, self.counter + torch.arange(count, device=self.key.device))
        self.counter.add_(count)
        return {f"{HOLDER}.key": keys, f"{HOLDER}.counter": torch.zeros_like(keys)}


# -- the layers --------------------------------------------------------------------------------------------------------
class _Drawing(nn.Module):
    """Goes before a layer's own class; `draws` is no submodule of the layer but the model's."""

    draws: Draws
    p: float
    inplace: bool

    def _drop(self, x: Tensor, mask: tuple[int, ...]) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return dropped(x, self.draws.keep(mask, self.p), self.p, self.inplace)


class _Dropout(_Drawing):
    def forward(self, x: Tensor) -> Tensor:
        return self._drop(x, tuple(x.shape))


class _ChannelDropout(_Drawing):
    unbatched = 0  # dimensions of an input without a batch

    def forward(self, x: Tensor) -> Tensor:
        return self._drop(x, whole_channels(x, first=1 if x.ndim == self.unbatched else 2))


class _Dropout1d(_ChannelDropout):
    unbatched = 2


class _Dropout3d(_ChannelDropout):
    unbatched = 4


class _AlphaDropout(_Drawing):
    def _drop(self, x: Tensor, mask: tuple[int, ...]) -> Tensor:
        if not self.training or self.p == 0:
            return x
        new = alpha_dropped(x, self.draws.keep(mask, self.p), self.p)
        return x.copy_(new) if self.inplace else new

    def forward(self, x: Tensor) -> Tensor:
        return self._drop(x, tuple(x.shape))


class _FeatureAlphaDropout(_AlphaDropout):
    def forward(self, x: Tensor) -> Tensor:
        return self._drop(x, whole_channels(x, first=2))


class _DropPath(_Drawing):
    """timm's: whole samples of a residual branch."""

    drop_prob: float | None
    scale_by_keep: bool

    def forward(self, x: Tensor) -> Tensor:
        p = self.drop_prob or 0.0
        if not self.training or p == 0:
            return x
        return dropped(x, self.draws.keep(whole_channels(x, first=1), p), p, scaled=self.scale_by_keep)


class _StochasticDepth(_Drawing):
    """torchvision's: whole samples, or with `mode` "batch" all of them or none."""

    mode: str

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        mask = whole_channels(x, first=1 if self.mode == "row" else 0)
        return dropped(x, self.draws.keep(mask, self.p), self.p)


class _Attention(_Drawing):
    """torch's, whose dropout of the attention weights is no layer: dropped here, between its softmax and its values."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        layer: Any = self
        p: float = layer.dropout
        plain: Callable[..., tuple[Tensor, Tensor | None]] = super().forward
        masks: dict[str, Any] = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask, "is_causal": is_causal}
        if not self.training or p == 0:
            return plain(
                query, key, value, need_weights=need_weights, average_attn_weights=average_attn_weights, **masks
            )
        layer.dropout = 0.0
        try:
            _, weights = plain(query, key, value, need_weights=True, average_attn_weights=False, **masks)
        finally:
            layer.dropout = p
        assert weights is not None  # (N, heads, L, S), or (heads, L, S) without a batch
        weights = dropped(weights, self.draws.keep(tuple(weights.shape), p), p)
        mixed = (weights @ _values(layer, value)).transpose(-3, -2).flatten(-2)  # (N, L, embedding)
        out: Tensor = layer.out_proj(mixed)
        if query.ndim == 3 and not layer.batch_first:
            out = out.transpose(0, 1)
        shown = weights.mean(dim=-3) if average_attn_weights else weights
        return out, shown if need_weights else None


def _values(layer: Any, value: Tensor) -> Tensor:
    """What the attention weights weigh: (N, heads, S, embedding / heads), or without N."""
    size = layer.embed_dim
    weight = layer.in_proj_weight[2 * size :] if layer._qkv_same_embed_dim else layer.v_proj_weight
    values = F.linear(value, weight, None if layer.in_proj_bias is None else layer.in_proj_bias[2 * size :])
    if value.ndim == 3 and not layer.batch_first:
        values = values.transpose(0, 1)
    one = (*values.shape[:-2], 1, size)
    if layer.bias_v is not None:
        values = torch.cat([values, layer.bias_v.view(size).expand(one)], dim=-2)
    if layer.add_zero_attn:
        values = torch.cat([values, values.new_zeros(one)], dim=-2)
    return values.view(*values.shape[:-1], layer.num_heads, -1).transpose(-3, -2)


# -- what they do ------------------------------------------------------------------------------------------------------
def dropped(x: Tensor, keep: Tensor, p: float, inplace: bool = False, scaled: bool = True) -> Tensor:
    """x where `keep` says so, divided by 1 - p, and zero elsewhere.

    >>> dropped(torch.ones(3), torch.tensor([True, False, True]), p=0.5)
    tensor([2., 0., 2.])
    """
    scale = 1 / (1 - p) if scaled and p < 1 else 1.0
    return x.mul_(keep).mul_(scale) if inplace else x * keep * scale


def alpha_dropped(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Entries that go take SELU's limit, and all are moved so that mean and variance stay (Klambauer et al. 2017)."""
    if p == 1:
        return x * keep
    scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
    return x * keep * scale + (p - (~keep).to(x.dtype)) * (_ALPHA * scale)


def whole_channels(x: Tensor, first: int) -> tuple[int, ...]:
    """The shape of a mask with one number for each place of the first dimensions."""
    return (*x.shape[:first], *[1] * (x.ndim - first))


# -- surgery -----------------------------------------------------------------------------------------------------------
_LAYERS: dict[type[nn.Module], type[_Drawing]] = {
    nn.Dropout: _Dropout,
    nn.Dropout1d: _Dropout1d,
    nn.Dropout2d: _ChannelDropout,
    nn.Dropout3d: _Dropout3d,
    nn.AlphaDropout: _AlphaDropout,
    nn.FeatureAlphaDropout: _FeatureAlphaDropout,
    nn.MultiheadAttention: _Attention,
}
# By name: these libraries take long to import, and a model that has such a layer has imported them.
_FOREIGN = {("timm", "DropPath"): _DropPath, ("torchvision", "StochasticDepth"): _StochasticDepth}
_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def draw_dropout(model: nn.Module) -> Draws | None:
    """Let every layer that drops something draw from one `Draws`, which is returned; None where there is no such layer.

    A subclass that has a forward of its own is left alone. Doing it twice changes nothing.
    """
    layers = [module for module in model.modules() if isinstance(module, _Drawing) or _drawing_kind(module)]
    if not layers:
        return None
    draws = getattr(model, HOLDER, None) or Draws()
    model.add_module(HOLDER, draws)
    for layer in layers:
        if not isinstance(layer, _Drawing):
            kind = _drawing_kind(layer)
            assert kind is not None
            layer.__class__ = _with_draws(kind, type(layer))
        layer.__dict__["draws"] = draws  # past `nn.Module`, which would make it a submodule of every layer
    for module in model.modules():
        drop: Any = getattr(module, "attn_drop", None)
        if getattr(module, "fused_attn", False) and isinstance(drop, _Drawing) and drop.p > 0:
            module.__dict__["fused_attn"] = False  # timm's attentions then call their dropout layer
            draws.unfused.append(module)
    return draws


def plain_dropout(model: nn.Module) -> None:
    """Undo `draw_dropout`: the layers are torch's again and draw from its default generator."""
    draws: Draws | None = getattr(model, HOLDER, None)
    if draws is None:
        return
    for layer in model.modules():
        if isinstance(layer, _Drawing):
            layer.__class__ = type(layer).__bases__[1]
            del layer.__dict__["draws"]
    for module in draws.unfused:
        module.__dict__["fused_attn"] = True
    delattr(model, HOLDER)


def number_of_draws(model: nn.Module) -> Tensor:
    """How many masks were drawn since the client began: int64, scalar."""
    draws: Draws | None = getattr(model, HOLDER, None)
    return torch.zeros((), dtype=torch.int64) if draws is None else draws.counter


def _drawing_kind(module: nn.Module) -> type[_Drawing] | None:
    own = type(module)
    for plain, kind in _LAYERS.items():
        if isinstance(module, plain) and own.forward is plain.forward:
            return kind
    return _FOREIGN.get((own.__module__.partition(".")[0], own.__name__))


def _with_draws(kind: type[_Drawing], own: type[nn.Module]) -> type[nn.Module]:
    return _CLASSES.setdefault((kind, own), type(own.__name__, (kind, own), {}))
