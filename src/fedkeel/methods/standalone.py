"""Standalone: every client trains alone. What federation must beat on each client's own domain."""

from collections.abc import Callable

from torch import nn

from fedkeel.methods import Method, Traits, register


@register("standalone")
class Standalone(Method):
    """Each client trains on its own data alone and nothing travels: the lower bound of a federation."""

    paper = "baseline of FedWon, Table 1"
    traits = Traits(needs_memory=True, personal=True)
    unseen = "initial"

    def prepare(self, model: nn.Module) -> Callable[[], None]:
        def keep_all() -> None:
            self.kept = [*model.state_dict()]

        return keep_all
