"""What a network is trained on: `--loss 'focal(gamma=2)'`. A file in this folder adds one; methods add terms to it.

A loss gives every sample a number, whose mean over a batch is differentiated. It asks the host nothing, because steps
are replayed on a GPU. The tests' `loss` is the cross-entropy whatever a network was trained on.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedkeel import spec
from fedkeel.core.client import cross_entropy as usual
from fedkeel.errors import FedkeelError
from fedkeel.options import checked, described
from fedkeel.registry import Registry, discover

Loss = Callable[[Tensor, Tensor], Tensor]  # logits (N, C) and labels (N,) -> (N,), or their mean, ()
LOSSES: Registry[Loss] = Registry("loss")
BALANCED = "balanced"


class TrainingLoss:
    """The loss of a run on one worker: of one client after another."""

    def __init__(self, text: str, num_classes: int, device: torch.device) -> None:
        given = spec.parse(text)
        self._loss = LOSSES.make(given.name, **given.options)
        self._plain = text == "cross-entropy"
        weights = getattr(self._loss, "weights", None)
        self.weights = weights if isinstance(weights, ClassWeights) else None
        if self.weights:
            self.weights.make(num_classes, device)
        if not self._plain:
            self._try(text, torch.zeros(2, num_classes, device=device, requires_grad=True))

    def _try(self, text: str, logits: Tensor) -> None:
        """Somebody's own may be anything."""
        try:
            losses = self._loss(logits, torch.tensor([0, logits.shape[1] - 1], device=logits.device))
        except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise FedkeelError(f"The loss '{text}' cannot be computed for logits (2, C): {reason}.") from error
        if not isinstance(losses, Tensor) or losses.shape not in ((), (2,)) or not losses.requires_grad:
            got = f"a tensor {tuple(losses.shape)}" if isinstance(losses, Tensor) else described(losses)
            raise FedkeelError(
                f"The loss '{text}' gives {got} for logits (2, C): return (2,), a number for each sample that can be "
                "differentiated."
            )

    def begin(self, labels: Callable[[], Tensor]) -> None:
        """A client begins, whose training labels these are."""
        if self.weights:
            self.weights.begin(labels)

    def __call__(self, logits: Tensor, labels: Tensor, *, total: bool = False) -> Tensor:
        """The mean over the batch, or the `total`."""
        if self._plain:
            return usual(logits, labels, total=total)
        losses = self._loss(logits, labels)
        if losses.ndim == 0:
            return losses * len(labels) if total else losses
        return losses.sum() if total else losses.mean()


class ClassWeights:
    """A factor for the loss of each class: numbers in the order of the classes, or "balanced" for n / (K n_c), with
    which the K classes that a client has count the same on it; n_c of its n training samples are of class c.

    A number alone is, of two classes, the factor of the second; the first has what is left to one.
    """

    def __init__(self, option: str, given: Any) -> None:
        self.option, self.balanced = option, given == BALANCED
        self.values: Tensor | None = None  # stays where it is: captured steps refer to it
        numbers = given if isinstance(given, list | tuple) else str(given).split(",")
        self._numbers = [] if self.balanced or given in ("", None) else [self._number(n, given) for n in numbers]

    def _number(self, text: Any, given: Any) -> float:
        wanted = f"'{self.option}' is {described(given)}: give '{BALANCED}', or a number for each class like '1,2,5'."
        try:
            number = checked(float(text), float, f"A number in '{self.option}'")
        except (TypeError, ValueError):
            raise FedkeelError(wanted) from None
        if number < 0:
            raise FedkeelError(wanted)
        return float(number)

    def make(self, num_classes: int, device: torch.device) -> None:
        if len(self._numbers) == 1 and num_classes == 2 and self._numbers[0] <= 1:
            self._numbers = [1 - self._numbers[0], self._numbers[0]]
        if self._numbers and len(self._numbers) != num_classes:
            raise FedkeelError(
                f"'{self.option}' has {len(self._numbers)} numbers, but there are {num_classes} classes: give one for "
                f"each, or '{BALANCED}'."
            )
        if self._numbers or self.balanced:
            self.values = torch.tensor(self._numbers or [1.0] * num_classes, device=device)

    def begin(self, labels: Callable[[], Tensor]) -> None:
        if self.balanced and self.values is not None:
            counts = torch.bincount(labels(), minlength=len(self.values)).double()
            present = counts > 0
            weights = torch.where(present, counts.sum() / (present.sum() * counts.clamp_min(1)), 0.0)
            self.values.copy_(weights)


discover(__name__)
