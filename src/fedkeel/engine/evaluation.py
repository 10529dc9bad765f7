"""Accuracy and loss of a model on a client's data, under global or batch statistics."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeel import seeds
from fedkeel.config import Config
from fedkeel.core.client import Batch, Repeat, one_by_one
from fedkeel.core.evaluation import Evaluation
from fedkeel.core.types import Classifier
from fedkeel.data.federation import Client
from fedkeel.engine.batches import ImageStore
from fedkeel.nn.surgery import batch_statistics
from fedkeel.stopping import EVALUATION, reached


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
