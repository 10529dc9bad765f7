"""What training a network takes of the memory, at the least, computed before anything of it is made.

A network that looks at large images is large itself: its layers' outputs grow with the pixels, and so do the weights of
fully connected ones. On torch's device "meta" there are shapes and no numbers, so all of it can be counted for nothing.
"""

import math
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedkeel import models
from fedkeel.config import Config
from fedkeel.data import memory as room
from fedkeel.data.federation import Federation, extent
from fedkeel.engine.batches import probe

KEPT = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)  # the backward pass needs what comes after each of these
COPIES = 3  # of the weights: the client's, their gradients, the server's


class Footprint(NamedTuple):
    """Bytes of the weights, of tables such as those of positions, of the layers' outputs that training keeps for each
    image, and of the largest of these, which is there in an evaluation too."""

    weights: int = 0
    tables: int = 0
    outputs: int = 0
    largest: int = 0


def refuse_too_large(config: Config, federation: Federation, device: torch.device) -> None:
    """Refuse a named model that this machine cannot hold, with one batch of images. On a GPU that is the GPU's affair,
    but for the weights, which are made here."""
    shape = tuple(probe(federation).shape[1:])
    clients = list(federation.one_of_each())
    trained = min(config.batch_size, max((client.samples for client in clients), default=1))
    tested = min(config.evaluation_batch, max((len(p) for c in clients for p in (c.validation, c.test)), default=1))
    for exactly in (False, True):
        of = Footprint()
        with suppress(Exception):  # what is wrong with the model is told when it is built
            of = footprint(config.model, federation.num_classes, shape, exactly=exactly)
        training, testing = of.weights * COPIES + of.outputs * trained, of.weights + of.largest * tested
        needed = of.tables + (max(training, testing) if device.type == "cpu" else of.weights)
        if needed <= (room.available() or 0):
            return
    batch = config.batch_size if training >= testing else config.evaluation_batch
    room.require(
        needed,
        f"The weights of '{config.model}' and a batch of {batch} samples of {extent(shape)}",
        "give a smaller size, batch or model",
    )


def footprint(model: str, num_classes: int, shape: tuple[int, ...], *, exactly: bool = True) -> Footprint:
    """Of a named model for images of this shape; if not exactly, then at most, as if no layer made an image smaller. A
    pass over the layers has PyTorch import its compiler, which takes longer than all else before the first step."""
    with torch.device("meta"), torch.no_grad():
        network = models.build_for(model, num_classes, shape)
        layers = [layer for layer in network.modules() if isinstance(layer, KEPT)]
        kept = [] if exactly else [4 * len(layer.weight) * math.prod(shape[1:]) for layer in layers]

        def count(_layer: nn.Module, _inputs: object, output: Tensor) -> None:
            kept.append(output.numel() * output.element_size())

        for layer in layers if exactly else ():
            layer.register_forward_hook(count)
        if exactly:
            network.eval()(torch.empty(1, *shape))
    weights, tables = (sum(t.nbytes for t in tensors) for tensors in (network.parameters(), network.buffers()))
    return Footprint(weights, tables, sum(kept), max(kept, default=0))
