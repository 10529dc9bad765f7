"""Two branches of a network, under batch and under given statistics, as one batch (GReg Eq. 5).

What comes before the first batch norm is the same in both branches and runs once. The first batch norm makes two
batches of one: [normalised with batch statistics; normalised with the given ones]. Everything after it runs on the
doubled batch, and every later batch norm treats the halves apart. So each convolution is called once, on twice the
samples, and the result is that of two passes.

That holds for networks that treat samples one by one after their first batch norm, and in which nothing goes around it.
`find_pairing` tries it: a skip that starts before the first batch norm, attention over the batch, or layers that draw
random numbers are found there, before any training.
"""

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.core.state import BatchNorm, batch_norms, moment_names
from fedkeel.core.types import Output
from fedkeel.errors import first_line
from fedkeel.nn.draws import Dropout
from fedkeel.nn.kernels import norms as kernels
from fedkeel.nn.mixed_batch_norm import (
    given_moments,
    plain_forward,
    replaced_forward,
    running_moments,
    update_momentum,
)
from fedkeel.nn.surgery import Norms, using_statistics

log = logging.getLogger("fedkeel")
_TOLERANCE = 1e-6
"""Of the trial in float64, relative to the largest number: far above rounding, far below a different network."""


@dataclass(frozen=True)
class Pairing:
    """How the branches of one network run as one batch: `doubled` says for each call of a batch norm, in order, whether
    its input already holds both."""

    doubled: tuple[bool, ...]

    def run(self, model: nn.Module, norms: Norms, statistics: Mapping[str, Tensor], x: Tensor) -> tuple[Output, Output]:
        """The outputs under batch statistics, which update the running ones, and under the given statistics."""
        calls = iter(self.doubled)

        def forward(name: str, norm: BatchNorm, x: Tensor) -> Tensor:
            return paired(name, norm, x, statistics, next(calls))

        with replaced_forward(norms, forward):
            return _halves(model(x))


class Pairings:
    """What `find_pairing` said about each resident model. It is tried once, and a network without is logged once."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[nn.Module, Pairing | str] = WeakKeyDictionary()

    def of(self, model: nn.Module, example: Callable[[], Tensor]) -> Pairing | str:
        if model not in self._found:
            x = example()
            if len(x) == 1:  # this cannot be tried on a single sample, which has no batch statistics anyway
                return "there is a single sample"
            self._found[model] = found = find_pairing(model, x)
            if isinstance(found, str) and len(self._found) == 1:
                name = type(getattr(model, "encoder", model)).__name__
                log.info("%s runs twice in each step, once for each kind of statistics: %s.", name, found)
        return self._found[model]


def naive(model: nn.Module, norms: Norms, statistics: Mapping[str, Tensor], x: Tensor) -> tuple[Output, Output]:
    """The same by two passes, for any network."""
    first: Output = model(x)
    with using_statistics(norms, statistics):
        second: Output = model(x)
    return first, second


@torch.no_grad()
def find_pairing(model: nn.Module, x: Tensor) -> Pairing | str:
    """A pairing that gives what two passes give, tried on a copy with at least two samples; or why there is none."""
    try:
        with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            return _try_pairing(copy.deepcopy(model).double().train(), x.double())
    except Exception as error:  # whatever a network does with a batch that doubles on its way
        return f"the doubled batch does not pass: {first_line(error)}"


def _try_pairing(model: nn.Module, x: Tensor) -> Pairing | str:
    norms = batch_norms(model)
    # Statistics that no batch has, so that the branches differ and a mistake shows.
    statistics: dict[str, Tensor] = {}
    for name, norm in norms.items():
        if norm.running_mean is not None:
            mean, var = running_moments(norm)
            statistics |= zip(moment_names(name), (mean + var.sqrt() / 2, 2 * var + 0.1), strict=True)
    rows: list[int] = []  # that each call of a batch norm sees, in both passes
    state = _generator_state(model, x.device)
    hooks = [norm.register_forward_pre_hook(lambda _, args: rows.append(len(args[0]))) for norm in norms.values()]
    expected = naive(model, norms, statistics, x)
    for hook in hooks:
        hook.remove()
    if not torch.equal(state, _generator_state(model, x.device)):
        return "it draws random numbers, which two passes draw apart"

    doubled: list[bool] = []

    def forward(name: str, norm: BatchNorm, x: Tensor) -> Tensor:
        single = rows[len(doubled)]
        if len(x) not in (single, 2 * single):
            raise ValueError(f"{name} gets {len(x)} rows where one branch has {single}")
        doubled.append(len(x) == 2 * single)
        return paired(name, norm, x, statistics, doubled[-1])

    with replaced_forward(norms, forward):
        both: Output = model(x)
    if len(both.logits) != 2 * len(x):
        return "its logits do not follow from its batch norms alone"
    if not _agree(_halves(both), expected):
        return "its samples depend on each other beyond batch norm"
    return Pairing(tuple(doubled))


def _halves(both: Output) -> tuple[Output, Output]:
    n = len(both.logits) // 2
    return Output(both.features[:n], both.logits[:n]), Output(both.features[n:], both.logits[n:])


def _agree(given: tuple[Output, Output], expected: tuple[Output, Output]) -> bool:
    return all(
        one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=_TOLERANCE * float(other.abs().max()))
        for one, other in zip((*given[0], *given[1]), (*expected[0], *expected[1]), strict=True)
    )


def _generator_state(model: nn.Module, device: torch.device) -> Tensor:
    """Of all that layers draw from."""
    states = [torch.get_rng_state(), *(m.counter.view(1).cpu() for m in model.modules() if isinstance(m, Dropout))]
    return torch.cat([*states, torch.cuda.get_rng_state(device).cpu()] if device.type == "cuda" else states)


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
