"""Two branches of a network, under batch and under given statistics, as one batch (GReg Eq. 5).

What comes before the first batch norm is the same in both branches and runs once. The first batch norm makes two
batches of one: [normalised with batch statistics; normalised with the given ones]. Everything after it runs on the
doubled batch, and every later batch norm treats the halves apart. So each convolution is called once, on twice the
samples, and the result is that of two passes.

That holds for networks that treat samples one by one after their first batch norm, and in which nothing goes around it.
`can_pair` tries it: a skip that starts before the first batch norm, attention over the batch, or layers that draw
random numbers are found there, before any training.
"""

import copy
import logging
from collections.abc import Callable, Mapping
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.core.state import BatchNorm, batch_norms, moment_names
from fedkeel.core.types import Output
from fedkeel.nn.kernels import norms as kernels
from fedkeel.nn.mixed_batch_norm import given_moments, plain_forward, replaced_forward, running_moments, update_momentum
from fedkeel.nn.surgery import Norms, using_statistics

log = logging.getLogger("fedkeel")
_TOLERANCE = 1e-6
"""Of the trial in float64, relative to the largest number: far above rounding, far below a different network."""


def at_once(model: nn.Module, norms: Norms, statistics: Mapping[str, Tensor], x: Tensor) -> tuple[Output, Output]:
    """The outputs under batch statistics, which update the running ones, and under the given statistics."""
    doubled = False

    def forward(name: str, norm: BatchNorm, x: Tensor) -> Tensor:
        nonlocal doubled
        y = paired(name, norm, x, statistics, doubled)
        doubled = doubled or norm.running_mean is not None
        return y

    with replaced_forward(norms, forward):
        both: Output = model(x)
    n = len(x)
    return Output(both.features[:n], both.logits[:n]), Output(both.features[n:], both.logits[n:])


def naive(model: nn.Module, norms: Norms, statistics: Mapping[str, Tensor], x: Tensor) -> tuple[Output, Output]:
    """The same by two passes, for any network."""
    first: Output = model(x)
    with using_statistics(norms, statistics):
        second: Output = model(x)
    return first, second


class Pairings:
    """What `can_pair` said of each resident model. It is tried once, and a network that runs twice is logged once."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

    def of(self, model: nn.Module, example: Callable[[], Tensor]) -> bool:
        if model not in self._found:
            x = example()
            if len(x) == 1:  # this cannot be tried on a single sample, which has no batch statistics anyway
                return False
            self._found[model] = can_pair(model, x)
            if not self._found[model] and len(self._found) == 1:
                log.info("This network runs twice in each step: its batch doubled is not the same as two passes.")
        return self._found[model]


@torch.no_grad()
def can_pair(model: nn.Module, x: Tensor) -> bool:
    """Whether `at_once` gives what two passes give, tried on a copy with at least two samples."""
    try:
        model, x = copy.deepcopy(model).double().train(), x.double()
        norms = batch_norms(model)
        # Statistics that no batch has, so that the branches differ and a mistake shows.
        statistics: dict[str, Tensor] = {}
        for name, norm in norms.items():
            if norm.running_mean is not None:
                mean, var = running_moments(norm)
                statistics |= zip(moment_names(name), (mean + var.sqrt() / 2, 2 * var + 0.1), strict=True)
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            expected, found = naive(model, norms, statistics, x), at_once(model, norms, statistics, x)
    except Exception:  # whatever a network does with a batch that doubles on its way
        return False
    return all(
        one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=_TOLERANCE * float(other.abs().max()))
        for one, other in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True)
    )


def paired(name: str, norm: BatchNorm, x: Tensor, statistics: Mapping[str, Tensor], doubled: bool) -> Tensor:
    """[x1 under batch statistics; x2 under the given ones], where x is [x1; x2] if `doubled` and else both."""
    if norm.running_mean is None:  # no global statistics to use: batch statistics in both branches
        return torch.cat([plain_forward(norm, half) for half in x.chunk(2)]) if doubled else plain_forward(norm, x)
    given, running = given_moments(name, norm, statistics), running_moments(norm)
    numbers = (*given, *running, norm.weight, norm.bias)
    if norm.training and norm.momentum is not None and kernels.takes("paired", x, *numbers):
        return kernels.paired(x, norm, given, doubled)
    # Views: the gradients of the branches are summed there, before those of other users join in, as of one layer.
    x, weight, bias = x.view_as(x), *(t if t is None else t.view_as(t) for t in (norm.weight, norm.bias))
    first, second = x.chunk(2) if doubled else (x, x)
    momentum = update_momentum(norm) if norm.training else 0.0
    under_batch = F.batch_norm(first, *running, weight, bias, norm.training, momentum, norm.eps)
    return torch.cat([under_batch, F.batch_norm(second, *given, weight, bias, False, 0.0, norm.eps)])
