"""Which of two methods is ahead: the one rule of every sentence, star, bold number, claim and piece of advice.

It goes by the seeds that both have, since a seed gives both the same split and the same start: the differences' mean
and its 95 % interval by Student's t. Above zero the first is ahead, below it behind, and across it nothing is decided;
nor is it by fewer than three seeds. Where it is known how many test images there are, the mean must also be more than
another draw of as many could change: the 95 % interval of a difference of two shares.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import inf, nan, sqrt
from statistics import fmean, stdev

from fedkeel.core.readable import percent

FEWEST = 3  # seeds
CONFIDENCE = 0.95
AHEAD, BEHIND, UNDECIDED, TOO_FEW = "ahead", "behind", "undecided", "too few seeds"
RULE = "paired over seeds, 95 % interval above zero"  # in words, beside whatever goes by it
ROUNDING = 1e-9  # what touches but for this touches


@dataclass(frozen=True)
class Cell:
    """Accuracy by seed: its mean, and its standard deviation (n - 1 in the denominator), None with a single seed."""

    by_seed: Mapping[int, float]

    @cached_property
    def mean(self) -> float:
        return fmean(self.by_seed.values())

    @cached_property
    def std(self) -> float | None:
        return stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None

    def to_dict(self) -> dict[str, float | None]:
        return {"mean": self.mean, "std": self.std}

    def __str__(self) -> str:
        return percent(self.mean) if self.std is None else f"{percent(self.mean)} ±{percent(self.std)}"


@dataclass(frozen=True)
class Difference:
    """A number minus another one, by seed; `floor` is what other test images could change.

    >>> other = Cell({0: 0.50, 1: 0.60, 2: 0.40, 3: 0.90})
    >>> Difference.of(Cell({0: 0.52, 1: 0.62, 2: 0.42}), other).verdict
    'ahead'
    >>> Difference.of(Cell({0: 0.52, 1: 0.62, 2: 0.50}), other).verdict
    'undecided'
    """

    by_seed: Mapping[int, float]
    floor: float = 0.0

    @staticmethod
    def of(one: Cell, other: Cell, images: Sequence[int] = ()) -> "Difference":
        """`images`: how many each of the domains was tested on, where they are accuracies, means over these domains."""
        pairs = {seed: (one.by_seed[seed], other.by_seed[seed]) for seed in one.by_seed if seed in other.by_seed}
        p, floor = (fmean(chain(*pairs.values())) if pairs else 0.0), 0.0
        if images and all(images):
            floor = 1.96 * sqrt(2 * p * (1 - p) * fmean(1 / count for count in images) / len(images))
        return Difference({seed: a - b for seed, (a, b) in pairs.items()}, floor)

    @cached_property
    def mean(self) -> float:
        return fmean(self.by_seed.values()) if self.by_seed else nan

    @cached_property
    def half_width(self) -> float:
        """Of the interval around the mean, within which the true difference lies 95 times of 100."""
        from scipy.special import stdtrit  # takes half a second

        n = len(self.by_seed)
        return float(stdtrit(n - 1, (1 + CONFIDENCE) / 2)) * stdev(self.by_seed.values()) / sqrt(n) if n > 1 else inf

    @property
    def verdict(self) -> str:
        if len(self.by_seed) < FEWEST:
            return TOO_FEW
        least = max(self.half_width, self.floor) + ROUNDING
        return AHEAD if self.mean > least else BEHIND if self.mean < -least else UNDECIDED


def unbeaten(column: Mapping[str, Cell], images: Sequence[int] = (), *, lower: bool = False) -> set[str]:
    """What is bold: where one of a column is ahead of another, those with seeds enough that none is ahead of."""
    worse, found = (AHEAD if lower else BEHIND), dict[str, set[str]]()
    for name, own in column.items():
        verdicts = {Difference.of(own, cell, images).verdict for other, cell in column.items() if other != name}
        if against := verdicts - {TOO_FEW}:
            found[name] = against
    best = {name for name, against in found.items() if worse not in against}
    return best if len(best) < len(found) else set()
