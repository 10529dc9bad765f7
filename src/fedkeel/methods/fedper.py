"""FedPer: Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv:1912.00818.

What features are is for all to learn; what to make of them differs from client to client. So the body is averaged, and
the head, or more of the last layers, stays on the client and is trained there only. Each client is tested with its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from fedkeel.errors import MethodError, nearest
from fedkeel.methods import Method, Traits, register
from fedkeel.spec import names


@register("fedper")
@dataclass
class FedPer(Method):
    """Each client keeps its head, or more of the last layers, to itself; the body below is averaged."""

    paper = "Arivazhagan et al. 2019 (FedPer)"
    traits = Traits(needs_memory=True, personal=True)

    layers: str | Sequence[str] = "head"  # names of the modules that stay

    def prepare(self, model: nn.Module) -> Callable[[], None]:
        def keep() -> None:  # afterwards: another part may put in a new head
            modules = {name: module for name, module in model.named_modules() if [*module.parameters()]}
            for layer in (kept := names(self.layers)):
                if layer not in modules:
                    raise MethodError(f"'{self.name}' is to keep '{layer}' on the client: {nearest(layer, modules)}")
            self.kept = [f"{layer}.{entry}" for layer in kept for entry in modules[layer].state_dict()]

        return keep
