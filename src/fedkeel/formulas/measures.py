"""Numbers of a whole test set, each with the error that the size of the set leaves: 95 % intervals.

Shares have Wilson's interval (1927), which also holds for few images and for shares of 0 and 1. F1 is 2J / (1 + J) of
the share J that is right among all that is, or is said to be, of the class, and gets its interval from J's. A mean of
independent numbers gets its interval from theirs (Zou and Donner 2008). AUC has the variance of DeLong et al. (1988),
as the number of images by which a share would be as uncertain. What a set has no images for is NaN, and not in means.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Measure", "auc", "calibration_error", "confusion", "mean_of", "of_confusion", "resampled", "wilson"]

Array = npt.NDArray[Any]
Z = 1.959963984540054  # 95 % of a normal distribution lie within so many deviations
RESAMPLES = 200


class Measure(NamedTuple):
    """A number and its 95 % interval; of a measure that has them, also those of each class.

    >>> Measure(0.5, 0.4, 0.6).to_list()
    [0.5, 0.4, 0.6]
    """

    value: float
    low: float
    high: float
    classes: tuple[Measure, ...] = ()

    def to_list(self) -> list[Any]:
        """For JSON, which has no NaN."""
        numbers: list[Any] = [float(number) if np.isfinite(number) else None for number in self[:3]]
        return [*numbers, [part.to_list() for part in self.classes]] if self.classes else numbers

    @staticmethod
    def of(given: Sequence[Any] | Array) -> Measure:
        value, low, high = (np.nan if number is None else float(number) for number in given[:3])
        return Measure(value, low, high, tuple(Measure.of(part) for part in given[3]) if len(given) > 3 else ())


def each(rows: Array) -> tuple[Measure, ...]:
    """From (K, 3): value, low and high."""
    return tuple(Measure.of(row) for row in rows)


def wilson(share: Any, number: Any) -> Array:
    """Shares of so many images: (..., 3), with their intervals.

    >>> wilson(0.5, 100).round(3).tolist()
    [0.5, 0.404, 0.596]
    """
    p, n = np.asarray(share, float), np.asarray(number, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        shift = Z**2 / n
        half = Z * np.sqrt(p * (1 - p) / n + shift / (4 * n))
        bounds = [(p + shift / 2 - half) / (1 + shift), (p + shift / 2 + half) / (1 + shift)]
    return np.stack([p, *(np.clip(bound, 0, 1) for bound in bounds)], axis=-1)


def mean_of(parts: Sequence[Measure] | Array, classes: tuple[Measure, ...] = (), *, same: bool = False) -> Measure:
    """The mean of independent numbers, over those that are known; or of numbers of the `same` images, whose errors go
    together.

    >>> [round(number, 3) for number in mean_of([Measure(0.5, 0.4, 0.6), Measure(0.7, 0.6, 0.8)])[:3]]
    [0.6, 0.529, 0.671]
    """
    rows = np.array([part[:3] for part in parts], float).reshape(-1, 3)
    rows = rows[~np.isnan(rows[:, 0])]
    if not len(rows):
        return Measure(np.nan, np.nan, np.nan, classes)
    value, distances = rows[:, 0].mean(), np.abs(rows[:, 1:] - rows[:, :1])
    distances = distances.mean(0) if same else np.sqrt((distances**2).sum(0)) / len(rows)
    return Measure(float(value), float(value - distances[0]), float(value + distances[1]), classes)


def confusion(labels: Array, predicted: Array, classes: int) -> Array:
    """How many images of each class (rows) are taken for each class (columns).

    >>> confusion(np.array([0, 0, 1]), np.array([0, 1, 1]), classes=2).tolist()
    [[1, 1], [0, 1]]
    """
    return np.bincount(labels * classes + predicted, minlength=classes**2).reshape(classes, classes)


def of_confusion(counts: Array) -> dict[str, Measure]:
    """What a confusion matrix says. A class that is never said has the precision 0, and any could be true.

    >>> of_confusion(np.array([[3, 1], [0, 4]]))["balanced-accuracy"].value
    0.875
    """
    hits, true, said = np.diag(counts), counts.sum(1), counts.sum(0)
    absent, total = true == 0, counts.sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        recall = wilson(hits / true, true)
        precision = np.where((said == 0)[:, None], [0.0, 0.0, 1.0], wilson(hits / said, said))
        together = wilson(hits / (true + said - hits), true + said - hits)
        f1 = 2 * together / (1 + together)
    by_class = {"recall": recall, "precision": precision, "f1": f1}
    for rows in by_class.values():
        rows[absent] = np.nan
    accuracy = wilson(hits.sum() / total, total) if total else np.full(3, np.nan)
    return {
        "accuracy": Measure.of(accuracy),
        "balanced-accuracy": mean_of(recall),
        **{name: mean_of(rows, each(rows)) for name, rows in by_class.items()},
    }


def auc(probabilities: Array, labels: Array) -> Measure:
    """Area under the ROC curve, each class against the rest: how often an image of the class is given a higher
    probability of it than one of another class, with ties as halves; and the mean over classes.

    >>> auc(np.array([[0.9, 0.1], [0.6, 0.4], [0.7, 0.3]]), np.array([0, 0, 1])).value
    0.5
    """
    rows, fewest = np.full((probabilities.shape[1], 3), np.nan), []
    together = np.zeros(len(labels))
    for c, score in enumerate(probabilities.T if np.isfinite(probabilities).all() else ()):
        is_own = labels == c
        own, rest = score[is_own], score[~is_own]
        if not len(own) or not len(rest):
            continue
        below, above = _share_below(own, rest), 1 - _share_below(rest, own)
        value, change = below.mean(), np.empty(len(labels))
        change[is_own], change[~is_own] = (below - value) / len(own), (above - value) / len(rest)
        together += change  # how each image's weight changes the value
        fewest.append(min(len(own), len(rest)))
        rows[c] = _by_variance(value, change, fewest[-1])
    if not fewest:
        return Measure(np.nan, np.nan, np.nan, each(rows))
    whole = _by_variance(np.nanmean(rows[:, 0]), together / len(fewest), min(fewest))
    return Measure.of(whole)._replace(classes=each(rows))


def _share_below(scores: Array, others: Array) -> Array:
    """Of each score the share of the others that lie below it; of ties the half."""
    ordered = np.sort(others)
    return (np.searchsorted(ordered, scores, "left") + np.searchsorted(ordered, scores, "right")) / (2 * len(others))


def _by_variance(value: float, changes: Array, fewest: int) -> Array:
    variance = float((changes**2).sum())
    return wilson(value, value * (1 - value) / variance if variance > 0 else fewest)


def calibration_error(probabilities: Array, labels: Array, bins: int) -> Measure:
    """Expected calibration error (Guo et al. 2017): between how sure a model is and how often it is right, in bins of
    equal width. The interval takes as given in which bins it is too sure.

    >>> round(calibration_error(np.array([[0.8, 0.2], [0.8, 0.2]]), np.array([0, 1]), bins=15).value, 3)
    0.3
    """
    sure = probabilities.max(1)
    if not np.isfinite(sure).all():
        return Measure(np.nan, np.nan, np.nan)
    place = np.clip(np.ceil(sure * bins).astype(int) - 1, 0, bins - 1)
    gap = sure - (probabilities.argmax(1) == labels)
    return mean_of_samples(gap * np.sign(np.bincount(place, gap, minlength=bins))[place])


def mean_of_samples(values: Array) -> Measure:
    """A mean over images, with the interval of a normal distribution."""
    value, count = float(values.mean()), len(values)
    error = Z * float(values.std(ddof=1)) / count**0.5 if count > 1 else np.nan
    return Measure(value, value - error, value + error)


def resampled(measure: Callable[[Array], float], samples: int, generator: np.random.Generator) -> tuple[float, float]:
    """The interval of any number of a test set: of test sets that are drawn from it (Efron 1979). `measure` gets the
    positions of the images that are drawn.

    >>> right = np.array([1, 1, 1, 0] * 25)
    >>> low, high = resampled(lambda drawn: right[drawn].mean(), len(right), np.random.default_rng(0))
    >>> bool(0.6 < low < 0.75 < high < 0.9)
    True
    """
    values = [measure(generator.integers(samples, size=samples)) for _ in range(RESAMPLES)]
    known = [value for value in values if np.isfinite(value)]
    low, high = np.percentile(known, [2.5, 97.5]) if known else (np.nan, np.nan)
    return float(low), float(high)
