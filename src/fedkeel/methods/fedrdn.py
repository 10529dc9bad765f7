"""FedRDN: Yan et al., "A Simple Data Augmentation for Feature Distribution Skewed Federated Learning", CVPR 2025.

Images of one site have its look: their mean colour and contrast. Each client k sends them once, before it first trains:
the mean mu^k over its images of the mean of each channel, and sigma^k likewise of the standard deviation. In training
an image is normalised with the pair of a client j drawn at random, so that the network sees it in every site's terms;
in testing, with its own client's:

    training   x <- (x - mu^j) / sigma^j,   j uniform over the clients, for each image anew
    testing    x <- (x - mu^k) / sigma^k

The released code draws one mean and one standard deviation for a whole batch, and each from a client of its own:
`draw="batch"`.

This takes the place of the data set's own normalisation, x' = (x - m) / s, without undoing it: in its terms the pair of
a client is ((mu - m) / s, sigma / s), and normalising x' with that is normalising x with (mu, sigma).

A client without a pair, because it has not trained yet or never will, is tested with that of its own images, batch by
batch of the evaluation: its pixels are there, its labels are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fedkeel.core.client import LocalClient
from fedkeel.core.messages import Expected
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.errors import FedkeelError, MethodError, TrainingError, nearest
from fedkeel.methods import register
from fedkeel.nn.draws import new_key, uniform

DRAWS = ("image", "batch")
_LEAST_STD = 1e-3  # of images of one colour


@register("fedrdn")
class FedRDN(Method):
    """Normalises each training image with the colour statistics of a client drawn at random, at test with its own."""

    paper = "Yan et al. 2025 (FedRDN)"
    traits = Traits(personal=True, capturable=True)

    def __init__(self, draw: str = "image") -> None:
        """`draw`: a pair for each "image", or, as in the released code, a mean and a deviation for each "batch"."""
        if draw not in DRAWS:
            raise FedkeelError(f"The 'draw' of fedrdn is '{draw}': {nearest(str(draw), DRAWS)}")
        self.draw = draw
        self._channels = 0

    def prepare(self, model: nn.Module) -> None:
        convolution = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
        if convolution is None:
            raise MethodError(
                f"'fedrdn' takes the number of colours from the first convolution, and {type(model).__name__} has "
                "none: choose a convolutional model."
            )
        self._channels = convolution.in_channels
        layer = OwnNormalisation(self._channels)
        model.add_module("own_normalisation", layer)
        model.register_forward_pre_hook(layer.before)

    def is_local(self, name: str) -> bool:
        return name.startswith("own_normalisation.")

    # -- on the client ---------------------------------------------------------------------------------------
    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        if question != "pair":
            return super().answer(client, question, tensors)
        return {"pair": own_pair(client)}

    def start(self, client: LocalClient) -> None:
        """Its own pair is put where testing finds it; key and counter of this round's draws are made."""
        layer = client.model.get_submodule("own_normalisation")
        assert isinstance(layer, OwnNormalisation)
        layer.pair.copy_(own_pair(client))
        layer.known.fill_(1)
        client.scratch["key"] = new_key(client.generator("fedrdn")).to(client.device)
        client.scratch["counter"] = torch.zeros((), dtype=torch.int64, device=client.device)

    def inputs(self, client: LocalClient, x: Tensor) -> Tensor:
        pairs, known = client.extras["pairs"], client.extras["known"]
        key, counter = client.scratch["key"], client.scratch["counter"]
        u = uniform(key, counter, len(x) if self.draw == "image" else 2)
        counter += 1
        drawn = pairs.index_select(0, torch.minimum((u * known).long(), known - 1))  # the product may round up
        mean, std = (drawn[:, 0], drawn[:, 1]) if self.draw == "image" else (drawn[:1, 0], drawn[1:, 1])
        return normalised(x, mean, std)

    # -- on the server ---------------------------------------------------------------------------------------
    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        return {"pair": Expected((2, self._channels))} if question == "pair" else {}

    def before_training(self, server: Server) -> None:
        """Ask those that come for the first time. The table has room for all, so that its shape never changes."""
        new = [name for name in server.participants if name not in server.memory]
        answers = server.ask(new, "pair") if new else {}
        server.memory = server.memory | {name: answers[name].tensors["pair"] for name in new if name in answers}
        pairs = list(server.memory.values())
        if not pairs:
            raise TrainingError("No client answered 'fedrdn' with its statistics, so there is nothing to draw from.")
        room = server.num_clients - len(pairs)
        table = torch.stack([*pairs, *[pairs[0]] * room])
        server.extras = {"pairs": table, "known": torch.tensor(len(pairs), device=table.device)}


class OwnNormalisation(nn.Module):
    """Normalises images with the client's own pair, in evaluation only: in training `FedRDN.inputs` has done it."""

    pair: Tensor
    known: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("pair", torch.zeros(2, channels))
        self.register_buffer("known", torch.zeros(()))

    def before(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.training:
            return None
        x = args[0]
        mean, std = self.pair.where(self.known > 0, image_statistics(x).mean(dim=0))
        return normalised(x, mean, std), *args[1:]


def image_statistics(x: Tensor) -> Tensor:
    """Mean and standard deviation of each channel of each image: (N, C, H, W) -> (N, 2, C)."""
    x = x.flatten(2).float()
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
