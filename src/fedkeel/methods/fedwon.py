"""FedWon: Zhuang and Lyu, "FedWon: Triumphing Multi-domain Federated Learning Without Normalization", ICLR 2024, Eq. 3,
Listing 1 and appendix Eq. 4.

Clients of different domains have no common batch statistics, so there are none: all normalisation layers go, and
convolutions with scaled weight standardisation keep the activations in range. Large batches need adaptive gradient
clipping with it. After training, `fedkeel.nn.fold` turns the network into plain convolutions with the same outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from torch import Tensor, nn

from fedkeel.methods import LocalClient, Method, Traits, register
from fedkeel.nn.clipping import agc_
from fedkeel.nn.scaled_ws_conv import to_scaled_ws
from fedkeel.nn.surgery import remove_normalisation
from fedkeel.options import Only, Positive
from fedkeel.spec import names

LARGE = 32  # a batch size
CLIPS, STANDARDISED = Only("agc", True, "auto"), Only("standardise", True)


@register("fedwon")
@dataclass
class FedWon(Method):
    """No normalisation layers; convolutions standardise their weights, and large batches clip their gradients."""

    paper = "Zhuang & Lyu 2024"
    traits = Traits(private={"local"}, capturable=True)

    clipping: Annotated[Positive, CLIPS] = 1.28  # lambda of Eq. 4 for Office-Caltech-10, DomainNet; Digits-Five 0.64
    agc: bool | Literal["auto"] = "auto"  # adaptive gradient clipping; "auto": for batches of 32 and more
    skip: Annotated[str | Sequence[str], STANDARDISED] = ()  # names of convolutions that stay plain
    init: Annotated[Literal["xavier", "keep"], STANDARDISED] = "xavier"  # Listing 1; "keep" for pretrained weights
    gain: Annotated[Positive, STANDARDISED] = 1.0  # where gamma of Eq. 3 starts; 1.71 for many ReLUs
    standardise: bool = True  # false leaves every convolution as it is (Tables 5 and 12)

    def prepare(self, model: nn.Module) -> None:
        if self.standardise:
            # First: it refuses a model without convolutions.
            to_scaled_ws(model, skip=names(self.skip), init=self.init, gain=self.gain)
        remove_normalisation(model)

    def start(self, client: LocalClient) -> None:
        """Which parameters are clipped: all that travel. Factors of HBN start at 0 and would be held there."""
        acts = client.config.batch_size >= LARGE if self.agc == "auto" else bool(self.agc)
        travelling = [p for name, p in client.model.named_parameters() if name in client.broadcast.weights]
        client.scratch["clipped"] = travelling if acts else []

    def gradients(self, client: LocalClient, recompute: Callable[[], Tensor]) -> None:
        agc_(client.scratch["clipped"], self.clipping)
