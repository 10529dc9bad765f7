"""Random functions that a forward calls itself: `F.dropout(x)`, `torch.rand_like(x)`, attention with dropout.

They are no layers that surgery could change. So the forward that calls them runs under a mode in which they draw from
the model's `Draws`. Which forwards do is read from their code: the names that they use, and those of the methods and
functions that they call.
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

from fedkeel.nn.draws import Draws, dropped

Function = Callable[..., Any]
_ALPHA = 1.7580993408473766  # minus the limit of SELU at minus infinity
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
