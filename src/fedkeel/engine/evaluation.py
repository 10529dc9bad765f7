"""Accuracy and loss of a model on a client's data, under global or batch statistics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeel import seeds
from fedkeel.config import Config
from fedkeel.data.federation import Client
from fedkeel.engine.batches import ImageStore
from fedkeel.models.output import Classifier
from fedkeel.nn.surgery import batch_statistics
from fedkeel.parties import Batch, Repeat, one_by_one
from fedkeel.stopping import EVALUATION, reached


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

    @property
    def accuracy(self) -> float:
        return self.correct / self.samples

    @property
    def loss(self) -> float:
        return self.loss_sum / self.samples


def split_indices(client: Client, split: str) -> Tensor:
    return client.test if split == "test" else client.validation


def evaluation_order(client: Client, split: str, statistics: str, seed: int) -> Tensor:
    """Under batch statistics the samples come in an order that is random but always the same: images often lie class
    by class, and a batch of one class has other statistics than any batch in training."""
    indices = split_indices(client, split)
    if statistics == "global":
        return indices
    return indices[torch.randperm(len(indices), generator=seeds.generator(seed, "evaluation", client.domain, split))]


class Totals(NamedTuple):
    """Sums over the batches of an evaluation, on the device."""

    correct: Tensor
    loss: Tensor

    @staticmethod
    def on(device: torch.device) -> Totals:
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return Totals(zero, zero.to(torch.float64))

    def clear(self) -> None:
        self.correct.zero_()
        self.loss.zero_()


def _add(model: Classifier, kind: str, totals: Totals, batch: Batch) -> None:
    # As in training, a single sample has no batch statistics and is normalised with the global ones.
    with batch_statistics(model) if kind == "batch" and len(batch.y) > 1 else nullcontext():
        logits = model(batch.x).logits.float()
    totals.correct.add_((logits.argmax(1) == batch.y).sum())
    totals.loss.add_(F.cross_entropy(logits, batch.y, reduction="sum"))


@torch.no_grad()
def evaluate(
    model: Classifier,
    store: ImageStore,
    client: Client,
    splits: Sequence[str],
    statistics: Sequence[str],
    config: Config,
    totals: Totals | None = None,
    repeat: Repeat = one_by_one,
    part: slice | None = None,
) -> list[Evaluation]:
    """`totals`, where given, are used again and again: with `repeat`, an evaluation can then be replayed. `part` is
    that of each split's samples which counts, if not all."""
    model.eval()
    totals = totals or Totals.on(store.device)
    results = []
    for split in splits:
        for kind in statistics:
            indices = evaluation_order(client, split, kind, config.seed)[part or slice(None)]
            if not len(indices):
                continue
            totals.clear()
            reached(EVALUATION)
            batches = store.in_order(indices, config.evaluation_batch, store.federation.test_transform)
            repeat(("evaluation", kind), partial(_add, model, kind, totals), batches)
            counts = int(totals.correct), len(indices), float(totals.loss)
            results.append(Evaluation(client.name, client.domain, split, kind, *counts))
    return results


def merged(parts: Iterable[Evaluation]) -> list[Evaluation]:
    """One evaluation for each split and kind of statistics, from those of a client's parts."""
    whole: dict[tuple[str, str], Evaluation] = {}
    for part in parts:
        key = (part.split, part.statistics)
        if key in whole:
            so_far = whole[key]
            sums = {name: getattr(so_far, name) + getattr(part, name) for name in ("correct", "samples", "loss_sum")}
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
    evaluations = list(evaluations)
    by_domain: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        by_domain.setdefault(evaluation.domain, []).append(evaluation)
    domains = {name: sum(e.accuracy for e in group) / len(group) for name, group in by_domain.items()}
    seen = [name for name in domains if name not in held_out] or list(domains)
    counted = [evaluation for name in seen for evaluation in by_domain[name]]
    total = sum(evaluation.samples for evaluation in counted)
    unseen_accuracies = [domains[name] for name in domains if name in held_out]
    return Scores(
        domains=domains,
        average=sum(domains[name] for name in seen) / len(seen),
        samples=sum(evaluation.correct for evaluation in counted) / total,
        unseen=sum(unseen_accuracies) / len(unseen_accuracies) if unseen_accuracies else None,
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
