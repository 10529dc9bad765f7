"""Each client's batch-norm statistics, layer by layer."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedkeel.analysis.snapshot import Snapshot
from fedkeel.core.state import Tensors
from fedkeel.data.federation import Client


class Statistics(NamedTuple):
    """Of one layer's inputs, by channel, (C,) each, in double precision."""

    mean: Tensor
    variance: Tensor


def normalised_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every layer with a running mean and variance, batch norm and HBN's, in the network's order."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "running_mean", None) is not None and getattr(module, "running_var", None) is not None
    }


def client_statistics(snapshot: Snapshot) -> dict[str, dict[str, Statistics]]:
    """By client and layer. While training, the running statistics that the client ended the round with; after the run,
    when those are gone, the moments of each layer's inputs over the client's training data under the final model."""
    if not snapshot.updates:
        return {client.name: _of_inputs(snapshot, client) for client in snapshot.clients}
    layers = normalised_layers(snapshot.worker.model)
    found = {}
    for client in snapshot.clients:
        tensors = {**snapshot.updates[client.name].statistics, **snapshot.kept(client.name)}
        found[client.name] = {layer: _running(tensors, layer) for layer in layers}
    return found


def _running(tensors: Tensors, layer: str) -> Statistics:
    prefix = f"{layer}." if layer else ""
    return Statistics(*(tensors[f"{prefix}{name}"].double().cpu() for name in ("running_mean", "running_var")))


def _of_inputs(snapshot: Snapshot, client: Client) -> dict[str, Statistics]:
    """Over all values that a layer gets: samples and positions together."""
    sums: dict[str, Tensor] = {}  # by layer: number, sum and sum of squares of each channel

    def add(layer: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].detach().double().transpose(0, 1).flatten(1)
        sums[layer] = sums.get(layer, 0) + torch.stack([torch.ones_like(x).sum(1), x.sum(1), x.square().sum(1)])

    snapshot.put_local(client)
    layers = normalised_layers(snapshot.worker.model)
    handles = [layer.register_forward_pre_hook(partial(add, name)) for name, layer in layers.items()]
    try:
        snapshot.outputs(client, client.train)
    finally:
        for handle in handles:
            handle.remove()
    moments = {layer: (total / count, squares / count) for layer, (count, total, squares) in sums.items()}
    return {layer: Statistics(m.cpu(), (square - m**2).clamp_min(0).cpu()) for layer, (m, square) in moments.items()}
