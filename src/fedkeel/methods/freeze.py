"""Freeze: the frozen head of Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification",
ICLR 2022, without its personalisation, as UniVarFL compares with.

The last layer is what leans most towards a client's own classes. So it stays as it was initialised, the same on every
client and in every round, and only the body below it learns.

The head is frozen for real: it gets no gradient, no momentum and no weight decay. (In the code that UniVarFL's
comparison goes back to, the switch never fires, and the head is trained.)
"""

from __future__ import annotations

from torch import nn

from fedkeel.errors import MethodError
from fedkeel.method import Method
from fedkeel.methods import register
from fedkeel.models.output import Classifier


@register("freeze")
class Freeze(Method):
    """The head stays as it was initialised; only the body below it is trained and averaged."""

    paper = "Oh et al. 2022 (FedBABU)"
    private = True
    surgery_order = 2  # last: another part may put in a new head

    def prepare(self, model: nn.Module) -> None:
        if not isinstance(model, Classifier) or not any(True for _ in model.head.parameters()):
            raise MethodError(
                f"'freeze' freezes the head, and {type(model).__name__} has none with weights: choose another model."
            )
        model.head.requires_grad_(False)
