"""Freeze: the frozen head of Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification",
ICLR 2022, without its personalisation, as UniVarFL compares with.

The last layer is what leans most towards a client's own classes. So the global one stays as it was initialised, the
same on every client at the start of every round, and only the body below it is learnt together. In the code to which
UniVarFL's comparison goes back the switch that freezes it never fires: that is `head="local"`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from fedkeel.core.types import Classifier
from fedkeel.errors import MethodError
from fedkeel.methods import Method, Server, Tensors, Traits, Update, register


@register("freeze")
@dataclass
class Freeze(Method):
    """The global head stays as it was initialised; only the body below it is trained and averaged."""

    paper = "Oh et al. 2022 (FedBABU)"
    traits = Traits(private=True, only_mean=True, surgery_order=2)  # last: another part may put in a new head

    head: Literal["fixed", "local"] = "fixed"  # never trained, or trained on each client and left out of the mean

    def prepare(self, model: nn.Module) -> None:
        if not isinstance(model, Classifier) or not any(True for _ in model.head.parameters()):
            raise MethodError(
                f"'freeze' freezes the head, and {type(model).__name__} has none with weights: choose another model."
            )
        if self.head == "fixed":
            model.head.requires_grad_(False)

    def send(self, server: Server, weights: Tensors) -> Tensors:
        """Also where another part sends something else than the server's weights: FedACG looks ahead."""
        return self._with_the_first_head(server, weights)

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        """Of a head that nobody has trained too: a private mean has noise on it."""
        return self._with_the_first_head(server, mean)

    def _with_the_first_head(self, server: Server, weights: Tensors) -> Tensors:
        own = {id(parameter) for parameter in server.network.head.parameters()}
        names = [name for name, p in server.network.named_parameters(remove_duplicate=False) if id(p) in own]
        return weights | {name: server.weights[name] for name in names if name in server.weights}
