"""Freeze: the frozen head of Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification",
ICLR 2022, without its personalisation, as UniVarFL compares with.

The last layer is what leans most towards a client's own classes. So the global one stays as it was initialised, the
same on every client at the start of every round, and only the body below it is learnt together.

`head="fixed"`: it is frozen for real and gets no gradient, no momentum and no weight decay. `head="local"`: clients
train it, and what they made of it is left out of the mean. That is what the code does to which UniVarFL's comparison
goes back, because there the switch that freezes it never fires.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from fedkeel.core.messages import Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.core.types import Classifier
from fedkeel.errors import FedkeelError, MethodError, nearest
from fedkeel.methods import register

HEADS = ("fixed", "local")


@register("freeze")
class Freeze(Method):
    """The global head stays as it was initialised; only the body below it is trained and averaged."""

    paper = "Oh et al. 2022 (FedBABU)"
    traits = Traits(private=True, only_mean=True, surgery_order=2)

    def __init__(self, head: str = "fixed") -> None:
        """`head`: "fixed", never trained, or "local", trained on each client and left out of the mean."""
        if head not in HEADS:
            raise FedkeelError(f"The 'head' of freeze is '{head}': {nearest(str(head), HEADS)}")
        self.head = head
        self._names: list[str] = []

    def prepare(self, model: nn.Module) -> None:
        if not isinstance(model, Classifier) or not any(True for _ in model.head.parameters()):
            raise MethodError(
                f"'freeze' freezes the head, and {type(model).__name__} has none with weights: choose another model."
            )
        own = {id(parameter) for parameter in model.head.parameters()}
        self._names = [name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in own]
        if self.head == "fixed":
            model.head.requires_grad_(False)

    def send(self, server: Server, weights: Tensors) -> Tensors:
        """Also where another part sends something else than the server's weights: FedACG looks ahead."""
        return self._with_the_first_head(server, weights)

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        """Of a head that nobody has trained too: a private mean has noise on it."""
        return self._with_the_first_head(server, mean)

    def _with_the_first_head(self, server: Server, weights: Tensors) -> Tensors:
        return weights | {name: server.weights[name] for name in self._names if name in server.weights}
