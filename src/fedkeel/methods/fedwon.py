"""FedWon: Zhuang and Lyu, "FedWon: Triumphing Multi-domain Federated Learning Without Normalization", ICLR 2024, Eq. 3,
Listing 1 and appendix Eq. 4.

Clients of different domains have no common batch statistics, so there are none: all normalisation layers go, and
convolutions with scaled weight standardisation keep the activations in range. Large batches need adaptive gradient
clipping with it. After training, `fedkeel.nn.fold` turns the network into plain convolutions with the same outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fedkeel.core.client import LocalClient
from fedkeel.core.method import Method, Traits
from fedkeel.errors import FedkeelError
from fedkeel.methods import register
from fedkeel.nn.clipping import agc_
from fedkeel.nn.scaled_ws_conv import to_scaled_ws
from fedkeel.nn.surgery import remove_normalisation


@register("fedwon")
class FedWon(Method):
    """No normalisation layers; convolutions standardise their weights, and large batches clip their gradients."""

    paper = "Zhuang & Lyu 2024"
    traits = Traits(private=True, capturable=True)

    def __init__(
        self,
        clipping: float = 1.28,
        agc: bool | str = "auto",
        agc_from_batch: int = 32,
        clip_head: bool = True,
        skip: str | Sequence[str] = (),
        init: str = "xavier",
        gain: float = 1.0,
        standardise: bool = True,
    ) -> None:
        """`clipping`: lambda of Eq. 4, 1.28 for Office-Caltech-10 and DomainNet; Digits-Five has 0.64.
        `agc`: true, false, or "auto": for batch sizes of `agc_from_batch` and more. `clip_head`: the classifier too.
        `skip`: names of convolutions that stay plain. `init`: "xavier" (Listing 1) or "keep", for pretrained weights.
        `gain`: where gamma of Eq. 3 starts, 1 in Listing 1; 1.71 keeps the signal's size behind a ReLU in deep nets.
        `standardise`: false leaves every convolution as it is (Tables 5 and 12).
        """
        if clipping <= 0:
            raise FedkeelError(f"The 'clipping' of fedwon is {clipping}: give a number above 0.")
        if agc not in (True, False, "auto"):
            raise FedkeelError(f"The 'agc' of fedwon is '{agc}': give true, false or auto.")
        if agc_from_batch < 1:
            raise FedkeelError(f"The 'agc_from_batch' of fedwon is {agc_from_batch}: give at least 1.")
        if not 0 < gain < math.inf:
            raise FedkeelError(f"The 'gain' of fedwon is {gain}: give a number above 0.")
        self.clipping, self.agc, self.agc_from_batch, self.clip_head = clipping, agc, agc_from_batch, clip_head
        self.skip, self.init, self.gain = (skip,) if isinstance(skip, str) else tuple(skip), init, gain
        self.standardise = standardise

    def prepare(self, model: nn.Module) -> None:
        if self.standardise:
            # First: it refuses a model without convolutions.
            to_scaled_ws(model, skip=self.skip, init=self.init, gain=self.gain)
        remove_normalisation(model)

    def start(self, client: LocalClient) -> None:
        """Which parameters are clipped: all that travel. Factors of HBN start at 0 and would be held there."""
        acts = client.config.batch_size >= self.agc_from_batch if self.agc == "auto" else bool(self.agc)
        client.scratch["clipped"] = [
            parameter
            for name, parameter in client.model.named_parameters()
            if acts and name in client.broadcast.weights and (self.clip_head or not name.startswith("head."))
        ]

    def gradients(self, client: LocalClient, recompute: Callable[[], Tensor]) -> None:
        agc_(client.scratch["clipped"], self.clipping)
