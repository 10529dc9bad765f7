"""FedRDN: Yan et al., "A Simple Data Augmentation for Feature Distribution Skewed Federated Learning", CVPR 2025.

Images of one site have its look: their mean colour and contrast. Each client k sends them once, before it first trains:
the mean mu^k over its images of the mean of each channel, and sigma^k likewise of the standard deviation. Training
normalises an image with the pair of a client drawn at random, so that the network sees it in every site's terms:

    training   x <- (x - mu^j) / sigma^j,   j uniform over the clients, for each image anew
    testing    x <- (x - mu^k) / sigma^k    its own client's; without one, that of the images themselves, by batches

This takes the place of the data set's own normalisation, x' = (x - m) / s, without undoing it: in its terms the pair of
a client is ((mu - m) / s, sigma / s), and normalising x' with that is normalising x with (mu, sigma).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedkeel.errors import MethodError, TrainingError
from fedkeel.methods import Expected, LocalClient, Method, Server, Tensors, Traits, register
from fedkeel.nn.draws import Draws
from fedkeel.nn.surgery import change_input

_LEAST_STD = 1e-3  # of images of one colour


@register("fedrdn")
class FedRDN(Method):
    """Normalises each training image with the colour statistics of a client drawn at random, at test with its own."""

    paper = "Yan et al. 2025 (FedRDN)"
    traits = Traits(personal=True, capturable=True)

    def prepare(self, model: nn.Module) -> None:
        first = next((layer for layer in model.modules() if isinstance(layer, nn.Conv2d)), None)
        if first is None:
            raise MethodError("'fedrdn' normalises the colours of images: choose a convolutional model.")
        layer = OwnNormalisation(first.in_channels)
        model.add_module("own_normalisation", layer)
        change_input(model, layer)
        self.kept = {f"own_normalisation.{entry}" for entry in layer.state_dict()}

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        return {"pair": own_pair(client)}

    def start(self, client: LocalClient) -> None:
        """Its own pair is put where testing finds it."""
        layer: Any = client.model.get_submodule("own_normalisation")
        client.scratch["layer"] = layer
        layer.pair.copy_(own_pair(client))
        layer.known.fill_(1)
        layer.begin(client.generator("fedrdn"))

    def inputs(self, client: LocalClient, x: Tensor) -> Tensor:
        pairs, known = client.extras["pairs"], client.extras["known"]
        u = client.scratch["layer"].uniform((len(x),))
        drawn = pairs.index_select(0, torch.minimum((u * known).long(), known - 1))  # the product may round up
        return normalised(x, drawn[:, 0], drawn[:, 1])

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        return {"pair": Expected.like("", server.network.get_buffer("own_normalisation.pair"))} if question else {}

    def before_training(self, server: Server) -> None:
        """Ask those that come for the first time. The table has room for all, so that its shape never changes."""
        if new := [name for name in server.participants if name not in server.memory]:
            answers = server.ask(new, "pair")
            server.memory = server.memory | {name: answers[name].tensors["pair"] for name in new if name in answers}
        pairs = list(server.memory.values())
        if not pairs:
            raise TrainingError("No client answered 'fedrdn' with its statistics, so there is nothing to draw from.")
        room = server.num_clients - len(pairs)
        table = torch.stack([*pairs, *[pairs[0]] * room])
        server.extras = {"pairs": table, "known": torch.tensor(len(pairs), device=table.device)}


class OwnNormalisation(Draws):
    """Normalises images with the client's own pair, in evaluation only: in training `FedRDN.inputs` has done it."""

    pair: Tensor
    known: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("pair", torch.zeros(2, channels))
        self.register_buffer("known", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x
        mean, std = self.pair.where(self.known > 0, image_statistics(x).mean(dim=0))
        return normalised(x, mean, std)


def image_statistics(x: Tensor) -> Tensor:
    """Mean and standard deviation of each channel of each image: (N, C, H, W) -> (N, 2, C)."""
    x = x.flatten(2).to(torch.get_default_dtype())
    return torch.stack([x.mean(dim=2), x.std(dim=2, correction=0)], dim=1)


@torch.no_grad()
def own_pair(client: LocalClient) -> Tensor:
    """The mean over the client's images, as they are without augmentation, of their statistics: (2, C). Kept."""
    if "pair" not in client.memory:
        batches = client.data.passes(client.config.evaluation_batch)
        client.memory["pair"] = torch.cat([image_statistics(batch.x) for batch in batches]).mean(dim=0)
    return client.memory["pair"]


def normalised(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(x - mean) / std with one pair, (C,) or (1, C), or one for each image, (N, C)."""
    return (x - mean[..., None, None]) / std.clamp_min(_LEAST_STD)[..., None, None]
