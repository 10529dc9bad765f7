"""Give all that a model drops, or draws in another way, the numbers of `nn.draws` in place of torch's, by surgery.

The layers stay the same objects with the same names, hooks and options; only their class changes. A layer that is used
twice in a forward drops other values each time, and so does every further forward of a step (GReg's second one, that of
a sharpness-aware step), as in plain PyTorch.

Random functions that a forward calls, `F.dropout(x)`, `torch.rand_like(x)`, attention with dropout, draw from the
model's `Draws` under a mode. Which forwards call them is read from their code: the names that they use, and those of
the methods and functions that they call.
"""

import math
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from fedkeel.nn.draws import HOLDER, Draws, dropped

Function = Callable[..., Any]
_ALPHA = 1.7580993408473766  # minus the limit of SELU at minus infinity
_PLAIN = {"dtype", "device", "layout"}  # what a call may say and still be drawn here; a generator of its own it keeps
_MASKS_AND_WEIGHTS = ("key_padding_mask", "need_weights", "attn_mask", "average_attn_weights", "is_causal")


class Redirected(TorchFunctionMode):
    """Inside, the random functions that networks call draw from `draws`."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.draws = draws

    def __torch_function__(self, func: Function, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = FUNCTIONS.get(func)
        return func(*args, **(kwargs or {})) if drawn is None else drawn(self.draws, *args, **(kwargs or {}))


def dropping(first: int | None = None, unbatched: int = -1, alpha: bool = False) -> Function:
    """Dropout with a number for each place of the `first` dimensions of its input, or of all.

    `unbatched`: dimensions of an input whose first one is not the batch's.
    """

    def drop(draws: Draws, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        drawn = input.ndim if first is None else first - (input.ndim == unbatched)
        keep = draws.keep((*input.shape[:drawn], *[1] * (input.ndim - drawn)), p)
        if not alpha:
            return dropped(input, keep, p, inplace)
        return input.copy_(_alpha_dropped(input, keep, p)) if inplace else _alpha_dropped(input, keep, p)

    return drop


def _alpha_dropped(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Entries that go take SELU's limit, and all are moved so that mean and variance stay (Klambauer et al. 2017)."""
    if p == 1:
        return x * keep
    scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
    return x * keep * scale + (p - (~keep).to(x.dtype)) * (_ALPHA * scale)


def _attention(draws: Draws, query: Tensor, key: Tensor, value: Tensor, *others: Any, **options: Any) -> Tensor:
    given = dict(zip(("attn_mask", "dropout_p", "is_causal"), others, strict=False)) | options
    p = given.pop("dropout_p", 0.0)
    if p == 0:
        return F.scaled_dot_product_attention(query, key, value, **given)
    attn_mask, scale = given.get("attn_mask"), given.get("scale")
    if given.get("enable_gqa"):
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], dim=-3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if given.get("is_causal"):
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if hidden else scores + attn_mask
    weights = scores.softmax(dim=-1)
    return dropped(weights, draws.keep(tuple(weights.shape), p), p) @ value


def _drawing(plain: Function, numbers: Callable[[Draws, tuple[int, ...]], Tensor]) -> Function:
    """`torch.rand(2, 3)`, `torch.rand((2, 3))`, `torch.rand_like(x)`."""

    def draw(draws: Draws, *size: Any, **options: Any) -> Any:
        if options.keys() - _PLAIN:
            return plain(*size, **options)
        shape, device, dtype = size, torch.get_default_device(), torch.get_default_dtype()
        if size and isinstance(size[0], Tensor):
            shape, device, dtype = size[0].shape, size[0].device, size[0].dtype
        elif len(size) == 1 and not isinstance(size[0], int):
            shape = size[0]
        return numbers(draws, tuple(shape)).to(options.get("device") or device, options.get("dtype") or dtype)

    return draw


def _bernoulli_(draws: Draws, x: Tensor, p: float | Tensor = 0.5, *, generator: Any = None) -> Tensor:
    if generator is not None:
        return x.bernoulli_(p, generator=generator)
    return x.copy_(draws.uniform(tuple(x.shape)) < p)


def _bernoulli(draws: Draws, p: Tensor, *, generator: Any = None) -> Tensor:
    return torch.bernoulli(p, generator=generator) if generator else (draws.uniform(tuple(p.shape)) < p).to(p.dtype)


FUNCTIONS: dict[Function, Function] = {
    F.dropout: dropping(),
    F.dropout1d: dropping(2, unbatched=2),
    F.dropout2d: dropping(2),
    F.dropout3d: dropping(2, unbatched=4),
    F.alpha_dropout: dropping(alpha=True),
    F.feature_alpha_dropout: dropping(2, alpha=True),
    torch.dropout: dropping(),
    F.scaled_dot_product_attention: _attention,
    torch.rand: _drawing(torch.rand, Draws.uniform),
    torch.randn: _drawing(torch.randn, Draws.normal),
    torch.rand_like: _drawing(torch.rand_like, Draws.uniform),
    torch.randn_like: _drawing(torch.randn_like, Draws.normal),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
}
_NAMES = {function.__name__ for function in FUNCTIONS}


# -- layers ------------------------------------------------------------------------------------------------------------
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


def draws_by_itself(module: nn.Module) -> bool:
    """Whether the module's own forward calls one of these functions, as far as its code tells.

    Of torch's own modules only dropout layers do. One whose rates are 0, as most of timm's, does not count: it draws
    nothing, and the mode would be in the compiler's way.
    """
    own = type(module)
    if isinstance(module, _DropoutNd):
        is_torchs = own.forward.__module__ == _DropoutNd.__module__
        if is_torchs or "super" in own.forward.__code__.co_names:
            return True
    return not own.__module__.startswith("torch.") and not _is_off(module) and _calls_one(own.forward, module, set())


def _is_off(module: nn.Module) -> bool:
    given = [value for name, value in {**vars(module), **module._modules}.items() if "drop" in name]
    rates = [rate for rate in (getattr(value, "p", value) for value in given) if isinstance(rate, int | float)]
    return bool(rates) and not any(rates)


def _calls_one(function: Any, module: nn.Module, seen: set[Any]) -> bool:
    if not isinstance(function, FunctionType) or function in seen or function.__module__.startswith("torch."):
        return False
    seen.add(function)
    for name in names_in(function.__code__):
        # `self.dropout(x)` calls a layer; where `self.dropout` is a rate, it is `F.dropout(x, self.dropout)`
        if name in _NAMES and not callable(getattr(module, name, None)):
            return True
        called = getattr(type(module), name, None) or function.__globals__.get(name)
        if any(called is drawn for drawn in FUNCTIONS) or _calls_one(called, module, seen):  # by any name
            return True
    return False


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def names_in(code: CodeType) -> set[str]:
    """What these ask for by name."""
    return {name for inner in codes_in(code) for name in inner.co_names}
