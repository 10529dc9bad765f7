"""What an evaluation on one client says, and the averages over clients, domains and samples."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Evaluation:
    """Counts on one client's split; sums, so that they can be pooled exactly."""

    client: str
    domain: str
    split: str
    statistics: str
    correct: int
    samples: int
    loss_sum: float
    metric_sums: dict[str, float] = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples

    @property
    def loss(self) -> float:
        return self.loss_sum / self.samples

    @property
    def metrics(self) -> dict[str, float]:
        """Of those that the run asks for, the mean over the samples."""
        return {name: total / self.samples for name, total in self.metric_sums.items()}


def merged(parts: Iterable[Evaluation]) -> list[Evaluation]:
    """One evaluation for each split and kind of statistics, from those of a client's parts."""
    whole: dict[tuple[str, str], Evaluation] = {}
    for part in parts:
        key = (part.split, part.statistics)
        if key in whole:
            so_far = whole[key]
            sums = {name: getattr(so_far, name) + getattr(part, name) for name in ("correct", "samples", "loss_sum")}
            sums["metric_sums"] = {name: total + part.metric_sums[name] for name, total in so_far.metric_sums.items()}
            part = replace(so_far, **sums)
        whole[key] = part
    return list(whole.values())


@dataclass(frozen=True)
class Scores:
    """One evaluated round, for one split and one kind of statistics.

    Attributes:
        domains: accuracy of each domain, the mean over its clients.
        average: mean over the training domains (each counts the same).
        samples: accuracy over all samples of the training domains.
        unseen: mean over the unseen domains, if there are any.
        loss: over all samples of the training domains whose loss is finite; None where none is.
    """

    domains: dict[str, float]
    average: float
    samples: float
    unseen: float | None
    loss: float | None


def summarise(evaluations: Iterable[Evaluation], unseen: Iterable[str] = ()) -> Scores:
    """Averages over domains and over samples."""
    held_out = set(unseen)
    by_domain: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        by_domain.setdefault(evaluation.domain, []).append(evaluation)
    domains = {name: sum(e.accuracy for e in group) / len(group) for name, group in by_domain.items()}
    seen = [name for name in domains if name not in held_out] or list(domains)
    counted = [evaluation for name in seen for evaluation in by_domain[name]]
    total = sum(evaluation.samples for evaluation in counted)
    held = [domains[name] for name in domains if name in held_out]
    return Scores(
        domains=domains,
        average=sum(domains[name] for name in seen) / len(seen),
        samples=sum(evaluation.correct for evaluation in counted) / total,
        unseen=sum(held) / len(held) if held else None,
        loss=_mean_loss(counted),
    )


def _mean_loss(evaluations: Iterable[Evaluation]) -> float | None:
    """Where a model diverged, or a site sends what is not a number, the others' losses stay what they are."""
    finite = [evaluation for evaluation in evaluations if math.isfinite(evaluation.loss_sum)]
    total = sum(evaluation.loss_sum for evaluation in finite)
    return total / sum(evaluation.samples for evaluation in finite) if finite and math.isfinite(total) else None


def diverged_domains(evaluations: Iterable[Evaluation]) -> list[str]:
    """The domains on which a loss is not finite."""
    return list(dict.fromkeys(e.domain for e in evaluations if not math.isfinite(e.loss_sum)))
