"""Give every layer of a model that drops something the masks of `nn.draws` in place of torch's, by surgery.

The layers stay the same objects with the same names, hooks and options; only their class changes. A layer that is used
twice in a forward drops other values each time, and so does every further forward of a step (GReg's second one, that of
a sharpness-aware step), as in plain PyTorch.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.nn.draws import HOLDER, Draws, dropped
from fedkeel.nn.redirected import Redirected, draws_by_itself

_MASKS_AND_WEIGHTS = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")


class _Drawing(nn.Module):
    """Goes before a layer's own class; `draws` is no submodule of the layer but the model's."""

    draws: Draws


class _Calling(_Drawing):
    """A module whose own forward calls random functions, as torch's dropout layers do."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return super().forward(*args, **kwargs)
        with Redirected(self.draws):
            return super().forward(*args, **kwargs)


class _Attention(_Drawing):
    """torch's, whose dropout of the attention weights is no layer: dropped here, between its softmax and its values."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        layer: Any = self
        p: float = layer.dropout
        plain: Callable[..., tuple[Tensor, Tensor | None]] = super().forward
        if not self.training or p == 0:
            return plain(query, key, value, *others, **options)
        given = dict(zip(_MASKS_AND_WEIGHTS, others, strict=False)) | options
        need_weights, average = given.pop("need_weights", True), given.pop("average_attn_weights", True)
        layer.dropout = 0.0
        try:
            _, weights = plain(query, key, value, need_weights=True, average_attn_weights=False, **given)
        finally:
            layer.dropout = p
        assert weights is not None  # (N, heads, L, S), or (heads, L, S) without a batch
        weights = dropped(weights, self.draws.keep(tuple(weights.shape), p), p)
        mixed = (weights @ _values(layer, value)).transpose(-3, -2).flatten(-2)  # (N, L, embedding)
        out: Tensor = layer.out_proj(mixed)
        if query.ndim == 3 and not layer.batch_first:
            out = out.transpose(0, 1)
        shown = weights.mean(dim=-3) if average else weights
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


# -- surgery -----------------------------------------------------------------------------------------------------------
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def draw_dropout(model: nn.Module) -> Draws | None:
    """Let every layer that drops something draw from one `Draws`, which is returned; None where there is no such layer.

    Doing it twice changes nothing.
    """
    found = [(module, _with_draws(module)) for module in model.modules()]
    layers = [(module, drawing) for module, drawing in found if drawing is not None]
    if not layers:
        return None
    draws = getattr(model, HOLDER, None) or Draws()
    model.add_module(HOLDER, draws)
    for layer, drawing in layers:
        layer.__class__ = drawing
        layer.__dict__["draws"] = draws  # past `nn.Module`, which would make it a submodule of every layer
    return draws


def number_of_draws(model: nn.Module) -> Tensor:
    """How many masks were drawn since the client began: int64, scalar."""
    draws: Draws | None = getattr(model, HOLDER, None)
    return torch.zeros((), dtype=torch.int64) if draws is None else draws.counter


def _with_draws(module: nn.Module) -> type[nn.Module] | None:
    """The class that this module draws with, or None for one that does not draw, or in a way that nobody knows."""
    own = type(module)
    if isinstance(module, _Drawing):
        return own
    attends = own.forward is nn.MultiheadAttention.forward
    if not attends and not draws_by_itself(module):
        return None
    if own not in _CLASSES:
        _CLASSES[own] = type(own.__name__, (_Attention if attends else _Calling, own), {})
    return _CLASSES[own]
