"""What a network is trained on: `--loss 'cross-entropy(class_weights=balanced)'`; methods add terms to it.

A loss gives every sample a number, whose mean over a batch is differentiated. It asks the host nothing, because steps
are replayed on a GPU. The tests' `loss` is the cross-entropy whatever a network was trained on.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeel import spec
from fedkeel.core.client import cross_entropy as usual
from fedkeel.errors import FedkeelError, first_line
from fedkeel.options import NotNegative, Share, check_fields, described
from fedkeel.registry import Registry

__all__ = ["LOSSES", "Loss"]

Loss = Callable[[Tensor, Tensor], Tensor]
"""Logits (N, C) and labels (N,) -> the loss of each sample, (N,), or their mean, ()."""
LOSSES: Registry[Loss] = Registry("loss")
"""The losses by name. One of your own: `@LOSSES.register("name")` above a function that takes its options."""


@LOSSES.register("cross-entropy")
@dataclass
class CrossEntropy:
    """-log of the probability of the true class, of which label_smoothing is given to all classes alike.

    `class_weights` are numbers in the order of the classes, or "balanced" for n / (K n_c), with which the K classes
    that a client has count the same on it; n_c of its n training samples are of class c.
    """

    label_smoothing: Share = 0.0  # of the probability that is spread over all classes
    class_weights: Any = ""  # "balanced", or a number for each class

    def __post_init__(self) -> None:
        check_fields(self, "The '{}' of cross-entropy")
        self.weights: Tensor | None = None  # stays where it is: captured steps refer to it
        given = self.class_weights
        self._balanced = given == "balanced"
        listed = given if isinstance(given, list | tuple) else str(given).split(",")
        try:
            self._numbers = [] if given in ("balanced", "", None) else [float(text) for text in listed]
        except (TypeError, ValueError):
            self._numbers = [-1.0]
        if not all(0 <= number < math.inf for number in self._numbers):
            wanted = "give 'balanced', or a number from 0 for each class"
            raise FedkeelError(f"'class_weights' is {described(given)}: {wanted}.")

    def make(self, num_classes: int, device: torch.device) -> None:
        numbers = [1.0] * num_classes if self._balanced else self._numbers
        if numbers and len(numbers) != num_classes:
            raise FedkeelError(f"'class_weights' has {len(numbers)} numbers for {num_classes} classes: give as many.")
        self.weights = torch.tensor(numbers, device=device) if numbers else None

    def begin(self, labels: Callable[[], Tensor]) -> None:
        if self._balanced and self.weights is not None:
            counts = torch.bincount(labels(), minlength=len(self.weights)).double()
            present = counts > 0
            self.weights.copy_(torch.where(present, counts.sum() / (present.sum() * counts.clamp_min(1)), 0.0))

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        # Divided is by the number of samples, not by their weights: a sample counts the same in every batch, alone too.
        smoothing = self.label_smoothing
        return F.cross_entropy(logits, labels, self.weights, label_smoothing=smoothing, reduction="none")


@LOSSES.register("focal", paper="Lin et al. 2017")
def focal(gamma: NotNegative = 2.0) -> Loss:
    """-(1 - p)^gamma log p with p the probability of the true class: samples that are certain count little."""

    def measure(logits: Tensor, labels: Tensor) -> Tensor:
        entropy = F.cross_entropy(logits, labels, reduction="none")
        # 1 - p, exact where p is nearly 1; a power below 1 has no derivative at 0.
        return (-entropy.neg().expm1()).clamp_min(1e-12) ** gamma * entropy

    return measure


def requested(text: str) -> Loss:
    given = spec.parse(text)
    return LOSSES.make(given.name, **given.options)


class TrainingLoss:
    """The loss of a run on one worker: of one client after another."""

    def __init__(self, text: str, num_classes: int, device: torch.device) -> None:
        self._loss, self._plain = requested(text), text == "cross-entropy"
        if isinstance(self._loss, CrossEntropy):
            self._loss.make(num_classes, device)
        else:
            self._try(text, torch.zeros(2, num_classes, device=device, requires_grad=True))

    def _try(self, text: str, logits: Tensor) -> None:
        """Somebody's own may be anything."""
        problem = "it must return (N,), a number for each sample that depends on its logits (N, C)"
        try:
            losses = self._loss(logits, torch.tensor([0, logits.shape[1] - 1], device=logits.device))
            if losses.shape in ((), (2,)) and losses.requires_grad:
                return
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            problem = first_line(error)
        raise FedkeelError(f"The loss '{text}' cannot be used: {problem}.")

    def begin(self, labels: Callable[[], Tensor]) -> None:
        """A client begins, whose training labels these are."""
        if isinstance(self._loss, CrossEntropy):
            self._loss.begin(labels)

    def __call__(self, logits: Tensor, labels: Tensor, *, total: bool = False) -> Tensor:
        if self._plain:
            return usual(logits, labels, total=total)
        losses = self._loss(logits, labels)
        if losses.ndim == 0:
            return losses * len(labels) if total else losses
        return losses.sum() if total else losses.mean()
