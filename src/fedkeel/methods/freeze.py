"""Freeze: the frozen head of Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification",
ICLR 2022, without its personalisation, as UniVarFL compares with.

The last layer is what leans most towards a client's own classes. So the global one stays as it was initialised, the
same on every client at the start of every round, and only the body below it is learnt together. In the code to which
UniVarFL's comparison goes back the switch that freezes it never fires: that is `head="local"`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedkeel.core.types import Classifier
from fedkeel.methods import Method, Server, Tensors, Traits, Update, register


@register("freeze")
@dataclass
class Freeze(Method):
    """The global head stays as it was initialised; only the body below it is trained and averaged."""

    paper = "Oh et al. 2022 (FedBABU)"
    traits = Traits(private={"central", "local"})

    head: Literal["fixed", "local"] = "fixed"  # never trained, or trained on each client and left out of the mean

    def prepare(self, model: Classifier) -> Callable[[], object]:
        # afterwards: another part may put in a new head
        return lambda: model.head.requires_grad_(False) if self.head == "fixed" else None

    def before_training(self, server: Server) -> None:
        """The first head is remembered: another part may send something else (FedACG looks ahead), and a private mean
        has noise on a head that nobody has trained, too."""
        if not server.memory:
            own = {id(parameter) for parameter in server.network.head.parameters()}
            names = [name for name, p in server.network.named_parameters(remove_duplicate=False) if id(p) in own]
            server.memory = {name: server.weights[name] for name in names if name in server.weights}
        server.weights = server.weights | server.memory

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        return mean | server.memory
