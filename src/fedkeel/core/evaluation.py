"""What an evaluation on one client says, and the averages over clients, domains and samples."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Outputs(NamedTuple):
    """What a model says of a whole test set, on the CPU; it never leaves a site."""

    logits: Tensor  # (N, C)
    labels: Tensor  # (N,)
    images: Tensor  # (N,), their positions among the federation's


@dataclass(frozen=True)
class Evaluation:
    """Counts on one client's split; sums, so that they can be pooled exactly.

    What cannot be pooled is made of the `outputs` on the whole split: `values` of metrics and, of a detailed
    evaluation, `details`, see `fedkeel.engine.measuring`.
    """

    client: str
    domain: str
    split: str
    statistics: str
    correct: int
    samples: int
    loss_sum: float
    metric_sums: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] | None = None
    outputs: Outputs | None = field(default=None, compare=False, repr=False)

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples

    @property
    def loss(self) -> float:
        return self.loss_sum / self.samples

    @property
    def metrics(self) -> dict[str, float]:
        """Those that the run asks for: means over the samples, and numbers of the whole set."""
        return {name: total / self.samples for name, total in self.metric_sums.items()} | self.values


def merged(parts: Iterable[Evaluation]) -> list[Evaluation]:
    """One evaluation for each split and kind of statistics, from those of a client's parts."""
    by_set: dict[tuple[str, str], list[Evaluation]] = {}
    for part in parts:
        by_set.setdefault((part.split, part.statistics), []).append(part)
    return [_put_together(group) for group in by_set.values()]


def _put_together(parts: Sequence[Evaluation]) -> Evaluation:
    sums: dict[str, Any] = {name: sum(getattr(p, name) for p in parts) for name in ("correct", "samples", "loss_sum")}
    sums["metric_sums"] = {name: sum(part.metric_sums[name] for part in parts) for name in parts[0].metric_sums}
    if parts[0].outputs is not None:
        sums["outputs"] = Outputs(*map(torch.cat, zip(*(part.outputs for part in parts if part.outputs), strict=True)))
    return replace(parts[0], **sums)


@dataclass(frozen=True)
class Scores:
    """One evaluated round, for one split and one kind of statistics.

    Attributes:
        domains: accuracy of each domain, the mean over its clients.
        average: mean over the training domains (each counts the same).
        samples: accuracy over all samples of the training domains.
        unseen: mean over the unseen domains, if there are any.
        loss: over all samples of the training domains whose loss is finite; None where none is.
        metrics: of each metric that is asked for, `domains`, `average` and `unseen`, over those that have a number.
        diverged: the training domains whose loss is not finite, which the means of loss and metrics leave out.
    """

    domains: dict[str, float]
    average: float
    samples: float
    unseen: float | None
    loss: float | None
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    diverged: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        """As it is recorded: without metrics, where none are asked for, and without who diverged, if none did."""
        return {name: value for name, value in vars(self).items() if name not in ("metrics", "diverged") or value}


def summarise(evaluations: Iterable[Evaluation], unseen: Iterable[str] = ()) -> Scores:
    """Averages over domains and over samples."""
    held_out = set(unseen)
    by_domain: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        by_domain.setdefault(evaluation.domain, []).append(evaluation)
    seen = [name for name in by_domain if name not in held_out] or list(by_domain)
    counted = [evaluation for name in seen for evaluation in by_domain[name]]

    def averages(number: Callable[[Evaluation], float]) -> dict[str, Any]:
        domains = {name: known_mean([number(e) for e in group]) for name, group in by_domain.items()}
        held = [domains[name] for name in domains if name in held_out]
        average = known_mean([domains[name] for name in seen])
        return {"domains": domains, "average": average, "unseen": known_mean(held) if held else None}

    return Scores(
        **averages(lambda e: e.accuracy),
        samples=sum(evaluation.correct for evaluation in counted) / sum(evaluation.samples for evaluation in counted),
        loss=_mean_loss(counted),
        metrics={name: averages(lambda e, name=name: e.metrics[name]) for name in counted[0].metrics},  # type: ignore[misc]
        diverged=diverged_domains(counted),
    )


def known_mean(values: Sequence[float]) -> float:
    """Over those that are a number: a site without a class has no AUC for it, and may have none at all."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _mean_loss(evaluations: Iterable[Evaluation]) -> float | None:
    """Where a model diverged, or a site sends what is not a number, the others' losses stay what they are."""
    finite = [evaluation for evaluation in evaluations if math.isfinite(evaluation.loss_sum)]
    total = sum(evaluation.loss_sum for evaluation in finite)
    return total / sum(evaluation.samples for evaluation in finite) if finite and math.isfinite(total) else None


def diverged_domains(evaluations: Iterable[Evaluation]) -> list[str]:
    """The domains on which a loss is not finite."""
    return list(dict.fromkeys(e.domain for e in evaluations if not math.isfinite(e.loss_sum)))
