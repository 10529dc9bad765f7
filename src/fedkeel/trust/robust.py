"""Server rules that stand a share of clients whose updates are wrong, by mistake or on purpose.

| rule | paper | what it does |
|---|---|---|
| `norm-clip` | Sun et al., "Can You Really Backdoor Federated Learning?", 2019 | no update moves the model further |
| `median` | Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018, Def. 1 | the median of every entry |
| `trimmed-mean` | Yin et al. 2018, Def. 2 | the mean of every entry without its extremes |
| `krum`, `multi-krum` | Blanchard et al., "Machine Learning with Adversaries", NeurIPS 2017 | those near others count |

They are of two kinds. `norm-clip`, `krum` and `multi-krum` change or choose the updates before any rule of a method
sees them, so they compose with every method; an update that is not chosen is as if it had not come, on its client too.
`median` and `trimmed-mean` take the place of the weighted mean that methods start from; a method that does not start
from it cannot be protected so, and is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Annotated, ClassVar

from torch import Tensor

from fedkeel.core.composition import Composition
from fedkeel.core.messages import Broadcast, Update
from fedkeel.core.state import Tensors
from fedkeel.errors import FedkeelError, MethodError
from fedkeel.formulas.aggregation import weighted_mean
from fedkeel.formulas.robust import clipped, krum_scores, median, trimmed_mean, trimmed_number
from fedkeel.options import Positive, Range
from fedkeel.registry import Registry
from fedkeel.spec import parse_sum

log = logging.getLogger("fedkeel")


class Rule:
    """A robust rule. `replaces_mean`: it acts as `mean`, else as `select`. `fewest`: clients in a round that it needs.
    `alike`: clients' weights in the mean have no effect."""

    name = ""
    fewest = 1
    paper: ClassVar[str] = ""
    replaces_mean: ClassVar[bool] = False
    alike: ClassVar[bool] = False

    def select(self, broadcast: Broadcast, updates: Sequence[Update]) -> list[Update]:
        """The updates that count, perhaps changed."""
        return list(updates)

    def mean(self, states: Sequence[Tensors]) -> Tensors:
        """What takes the place of the weighted mean of the clients' tensors."""
        raise NotImplementedError


ROBUST: Registry[Rule] = Registry("robust rule", "robust")


@ROBUST.register("norm-clip")
@dataclass
class NormClip(Rule):
    """Scales an update's change down to a norm, that of the median client by default."""

    paper = "Sun et al. 2019"

    # Statistics, whose change has another scale, are clipped to the median of theirs.
    norm: Positive | None = None  # the largest change of all weights together; None for the median of the round

    def __post_init__(self) -> None:
        self.fewest = 1 if self.norm else 2

    def select(self, broadcast: Broadcast, updates: Sequence[Update]) -> list[Update]:
        weights = clipped([update.weights for update in updates], broadcast.weights, self.norm)
        statistics = clipped([update.statistics for update in updates], broadcast.statistics)
        return [
            replace(update, weights=w, statistics=s) for update, w, s in zip(updates, weights, statistics, strict=True)
        ]


@ROBUST.register("median")
class Median(Rule):
    """The median of every entry over the clients, in place of the mean."""

    paper = "Yin et al. 2018"
    replaces_mean = alike = True
    fewest = 3

    def mean(self, states: Sequence[Tensors]) -> Tensors:
        return {name: median([given[name] for given in states]) for name in states[0]}


@ROBUST.register("trimmed-mean")
@dataclass
class TrimmedMean(Rule):
    """The mean of every entry without its smallest and largest values, in place of the mean."""

    paper = "Yin et al. 2018"
    replaces_mean = alike = True

    share: Annotated[float, Range(above=0, below=0.5)] = 0.2  # of clients left out at either end, rounded down

    def __post_init__(self) -> None:
        self.fewest = next(clients for clients in count(1) if trimmed_number(self.share, clients))

    def mean(self, states: Sequence[Tensors]) -> Tensors:
        cut = trimmed_number(self.share, len(states))
        return {name: trimmed_mean([given[name] for given in states], cut) for name in states[0]}


@ROBUST.register("krum")
@dataclass
class Krum(Rule):
    """The one update that is nearest to its neighbours; nothing else counts."""

    paper = "Blanchard et al. 2017"
    alike = True

    liars: Annotated[int, Range(0)] = 1  # how many clients may lie; a round needs twice that and three more

    def __post_init__(self) -> None:
        self.fewest = 2 * self.liars + 3

    def select(self, broadcast: Broadcast, updates: Sequence[Update]) -> list[Update]:
        scores = _relative(krum_scores([update.weights for update in updates], self.liars))
        # Statistics have a scale of their own; a liar must not hide in either.
        scores = scores + _relative(krum_scores([update.statistics for update in updates], self.liars))
        best = sorted(range(len(updates)), key=lambda i: (float(scores[i]), i))[: self.kept(len(updates))]
        return [updates[i] for i in sorted(best)]

    def kept(self, updates: int) -> int:
        return 1


@ROBUST.register("multi-krum")
@dataclass
class MultiKrum(Krum):
    """The updates that are nearest to their neighbours; the others do not count."""

    alike = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.liars:
            raise FedkeelError("'multi-krum' with liars=0 leaves out no update: give at least one liar.")

    def kept(self, updates: int) -> int:
        return max(updates - self.liars, 1)


@dataclass(frozen=True)
class Defence:
    """The robust rules of a run: those that select, in the order written, then at most one in place of the mean."""

    rules: Sequence[Rule] = ()

    @staticmethod
    def of(text: str) -> Defence:
        """From the option `robust`: names with options joined by `+`; the empty text is the plain mean."""
        rules: list[Rule] = []
        for spec in parse_sum(text) if text.strip() else []:
            rules.append(ROBUST.make(spec.name, **spec.options))
            rules[-1].name = spec.name
        means = [rule.name for rule in rules if rule.replaces_mean]
        if len(means) > 1:
            raise FedkeelError(f"'{means[0]}' and '{means[1]}' both take the place of the mean: keep one of them.")
        return Defence(rules)

    def check(self, method: Composition) -> None:
        """A rule in place of the mean cannot protect what a method does not make of it."""
        name = self._instead_of_mean.name if self._instead_of_mean else ""
        for part in method.parts if name else ():
            made = [what for what in ("weights", "statistics") if what in part.traits.replaces and part.overrides(what)]
            if made or "shares" in part.traits.replaces:
                raise MethodError(
                    f"'{part.name}' makes the global model otherwise than from the clients' mean, which '{name}' "
                    "protects: choose 'krum' or 'multi-krum', or another method."
                )
            if part.overrides("extras"):
                log.warning(
                    f"'{name}' protects weights and statistics, but not what '{part.name}' makes of the clients' "
                    "extras: 'krum' and 'multi-krum' do."
                )

    def refuse_too_few(self, clients: int) -> None:
        for rule in self.rules:
            if clients < rule.fewest:
                needs = f"'{rule.name}' with these options needs {rule.fewest} clients in a round"
                raise FedkeelError(f"{needs}, and there are {clients}: let more take part, or choose another rule.")

    def select(self, broadcast: Broadcast, updates: Sequence[Update]) -> list[Update]:
        for rule in self.rules:
            updates = rule.select(broadcast, updates)
        return list(updates)

    def mean(self, states: Sequence[Tensors], shares: Sequence[float]) -> Tensors:
        rule = self._instead_of_mean
        return weighted_mean(states, shares) if rule is None else rule.mean(states)

    @property
    def _instead_of_mean(self) -> Rule | None:
        return next((rule for rule in self.rules if rule.replaces_mean), None)


def _relative(scores: Tensor) -> Tensor:
    """In units of their median, so that scores of different things can be added."""
    return scores / scores.quantile(0.5).clamp_min(1e-300)
