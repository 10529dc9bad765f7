"""Each client's batch-norm statistics, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from fedkeel.analysis.moment import Array, Moment
from fedkeel.core.state import Tensors
from fedkeel.data.federation import Client
from fedkeel.engine.local import Worker
from fedkeel.errors import FedkeelError


class Statistics(NamedTuple):
    """Of one layer's inputs, by channel: (C,) each."""

    mean: Array
    variance: Array


def normalised_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every layer with a running mean and variance, batch norm and HBN's, in the network's order."""
    return {
        name: module
        for name, module in model.named_modules()
        if getattr(module, "running_mean", None) is not None and getattr(module, "running_var", None) is not None
    }


def refuse_without_layers(worker: Worker, diagnostic: str) -> None:
    if not normalised_layers(worker.model):
        raise FedkeelError(
            f"'{diagnostic}' looks at batch-norm statistics, and the model of '{worker.method.name}' has none: choose "
            "another diagnostic, or a model and a method with batch norm."
        )


def client_statistics(moment: Moment) -> dict[str, dict[str, Statistics]]:
    """By client and layer. While training, the running statistics that the client ended the round with; after the run,
    when those are gone, the moments of each layer's inputs over the client's training data under the final model."""
    layers = normalised_layers(moment.worker.model)
    if not moment.updates:
        return {client.name: pass_statistics(moment, client) for client in moment.clients}
    return {
        client.name: {
            layer: running({**moment.updates[client.name].statistics, **moment.kept(client.name)}, layer)
            for layer in layers
        }
        for client in moment.clients
    }


def running(tensors: Tensors, layer: str) -> Statistics:
    prefix = f"{layer}." if layer else ""
    mean, variance = (tensors[f"{prefix}{name}"].double().cpu().numpy() for name in ("running_mean", "running_var"))
    return Statistics(mean, variance)


def pass_statistics(moment: Moment, client: Client) -> dict[str, Statistics]:
    """Over all values that a layer gets: samples and positions together."""
    moment.put_local(client)
    with listening(moment.worker.model) as sums:
        moment.outputs(client, client.train)
    found = {}
    for layer, (count, total, squares) in sums.items():
        mean = total / count
        found[layer] = Statistics(mean, np.maximum(squares / count - mean**2, 0))
    return found


@contextmanager
def listening(model: nn.Module) -> Iterator[dict[str, list[Any]]]:
    """Inside, what each layer gets is added up by channel: number, sum and sum of squares, in double precision."""
    sums: dict[str, list[Any]] = {}

    def listen(name: str) -> Any:
        def add(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0].detach().double()
            x = x.transpose(0, 1).flatten(1)
            parts = [x.shape[1], x.sum(1).cpu().numpy(), x.square().sum(1).cpu().numpy()]
            sums[name] = [old + new for old, new in zip(sums.get(name, [0, 0.0, 0.0]), parts, strict=True)]

        return add

    handles = [layer.register_forward_pre_hook(listen(name)) for name, layer in normalised_layers(model).items()]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()
