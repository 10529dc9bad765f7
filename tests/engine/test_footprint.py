from __future__ import annotations

import pytest
import torch
from torch import nn

from fedkeel import models, room
from fedkeel.config import Config
from fedkeel.engine.footprint import footprint
from fedkeel.engine.setup import prepare
from fedkeel.errors import FedkeelError
from tests import tiny


@pytest.mark.parametrize("model", ["simple_cnn", "resnet18", "vgg11", "alexnet"])
def test_weights_and_outputs_are_counted_as_they_will_be(model: str) -> None:
    weights, outputs = footprint(model, 7, (3, 64, 64))
    network = models.build_spec(model, num_classes=7, in_channels=3, image_size=(64, 64)).eval()
    assert weights == sum(4 * p.numel() for p in network.parameters())
    kept = []
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(lambda _layer, _inputs, output: kept.append(4 * output.numel()))
    network(torch.zeros(1, 3, 64, 64))
    assert outputs == sum(kept)


def test_a_network_that_does_not_fit_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    config, federation = Config(model="simple_cnn", device="cpu"), tiny.federation(side=16)
    weights, _ = footprint("simple_cnn", federation.num_classes, tuple(federation.images.shape[1:]))
    monkeypatch.setattr(room, "available", lambda: 3 * weights)
    with pytest.raises(FedkeelError, match=r"^The weights of 'simple_cnn' and a batch of .* need .* are free: give a"):
        prepare(config, federation=federation)
    monkeypatch.setattr(room, "available", lambda: 2**40)
    prepare(config, federation=federation)
