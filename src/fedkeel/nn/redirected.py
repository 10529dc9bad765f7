"""Random functions that a forward calls itself: `F.dropout(x)`, `torch.rand_like(x)`, attention with dropout.

They are no layers that surgery could change. So the forward that calls them runs under a mode in which they draw from
the model's `Draws`. Which forwards do is read from their code: the names that they use, and those of the methods and
functions that they call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedkeel.nn.masks import Draws, alpha_dropped, dropped, whole_channels

Function = Callable[..., Any]
_PLAIN = {"dtype", "device", "layout"}  # what a call may say and still be drawn here; a generator of its own it keeps


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
        shape = whole_channels(input, input.ndim if first is None else first - (input.ndim == unbatched))
        keep = draws.keep(shape, p)
        if not alpha:
            return dropped(input, keep, p, inplace)
        return input.copy_(alpha_dropped(input, keep, p)) if inplace else alpha_dropped(input, keep, p)

    return drop


def _attention(
    draws: Draws,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p == 0:
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, is_causal, **options)
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], dim=-3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if hidden else scores + attn_mask
    weights = scores.softmax(dim=-1)
    return dropped(weights, draws.keep(tuple(weights.shape), dropout_p), dropout_p) @ value


def _new(plain: Function, numbers: Callable[[Draws, tuple[int, ...]], Tensor]) -> Function:
    """`torch.rand` and its like."""

    def draw(draws: Draws, *size: Any, **options: Any) -> Any:
        if options.keys() - _PLAIN:
            return plain(*size, **options)
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        place = options.get("device") or torch.get_default_device()
        return numbers(draws, shape).to(place, options.get("dtype") or torch.get_default_dtype())

    return draw


def _like(plain: Function, numbers: Callable[[Draws, tuple[int, ...]], Tensor]) -> Function:
    def draw(draws: Draws, like: Tensor, **options: Any) -> Any:
        if options.keys() - _PLAIN:
            return plain(like, **options)
        return numbers(draws, tuple(like.shape)).to(
            options.get("device") or like.device, options.get("dtype") or like.dtype
        )

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
    torch.rand: _new(torch.rand, Draws.uniform),
    torch.randn: _new(torch.randn, Draws.normal),
    torch.rand_like: _like(torch.rand_like, Draws.uniform),
    torch.randn_like: _like(torch.randn_like, Draws.normal),
    torch.bernoulli: _bernoulli,
    Tensor.bernoulli_: _bernoulli_,
}
_NAMES = {function.__name__ for function in FUNCTIONS}


def draws_by_itself(module: nn.Module) -> bool:
    """Whether the module's own forward calls one of these functions, as far as its code tells.

    torch's own modules do not count: `nn.dropout` knows those. Nor does one whose rates are 0, as most of timm's: it
    draws nothing, and the mode would be in the compiler's way.
    """
    own = type(module)
    return not own.__module__.startswith("torch.") and not _is_off(module) and _calls_one(own.forward, module, set())


def _is_off(module: nn.Module) -> bool:
    given = [value for name, value in {**vars(module), **module._modules}.items() if "drop" in name]
    rates = [rate for rate in (getattr(value, "p", value) for value in given) if isinstance(rate, int | float)]
    return bool(rates) and not any(rates)


def _calls_one(function: Any, module: nn.Module, seen: set[Any]) -> bool:
    if not isinstance(function, FunctionType) or function in seen or function.__module__.startswith("torch."):
        return False
    seen.add(function)
    for name in _names(function.__code__):
        # `self.dropout(x)` calls a layer; where `self.dropout` is a rate, it is `F.dropout(x, self.dropout)`
        if name in _NAMES and not callable(getattr(module, name, None)):
            return True
        called = getattr(type(module), name, None) or function.__globals__.get(name)
        if any(called is drawn for drawn in FUNCTIONS) or _calls_one(called, module, seen):  # by any name
            return True
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
