from __future__ import annotations

import pytest
import torch
from torch import nn

from fedkeel import models
from fedkeel.config import Config
from fedkeel.data import memory as room
from fedkeel.engine import footprint as module
from fedkeel.engine.footprint import footprint
from fedkeel.engine.setup import prepare
from fedkeel.errors import FedkeelError
from tests import tiny


@pytest.mark.parametrize("model", ["simple_cnn", "resnet18", "vgg11", "alexnet"])
@pytest.mark.slow
def test_weights_and_outputs_are_counted_as_they_will_be(model: str) -> None:
    weights, tables, outputs, largest = footprint(model, 7, (3, 64, 64))
    network = models.build_spec(model, num_classes=7, in_channels=3, image_size=(64, 64)).eval()
    assert weights == sum(4 * p.numel() for p in network.parameters())
    kept = []
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layer.register_forward_hook(lambda _layer, _inputs, output: kept.append(4 * output.numel()))
    network(torch.zeros(1, 3, 64, 64))
    assert (outputs, largest) == (sum(kept), max(kept))
    assert tables == sum(t.nbytes for t in network.buffers())


def test_a_network_that_does_not_fit_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    config, federation = Config(model="simple_cnn", device="cpu"), tiny.federation(side=16)
    weights = footprint("simple_cnn", federation.num_classes, tuple(federation.images.shape[1:])).weights
    monkeypatch.setattr(room, "available", lambda: 3 * weights)
    with pytest.raises(FedkeelError, match=r"^The weights of 'simple_cnn' and a batch of .* need .* are free: give a"):
        prepare(config, federation=federation)
    monkeypatch.setattr(room, "available", lambda: 2**40)
    prepare(config, federation=federation)


def test_a_batch_of_the_evaluation_counts_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    needed: list[int] = []
    monkeypatch.setattr(room, "require", lambda bytes, *_: needed.append(bytes))
    monkeypatch.setattr(room, "available", lambda: 0)
    monkeypatch.setattr(module, "footprint", lambda *_, **__: module.Footprint(weights=10, outputs=100, largest=60))
    federation, cpu = tiny.federation(), torch.device("cpu")
    most = max(len(part) for client in federation for part in (client.validation, client.test))
    for batch in (1, 2, 10**6):
        module.refuse_too_large(Config(batch_size=1, evaluation_batch=batch), federation, cpu)
    assert needed == [130, 130, 10 + 60 * most]


def test_tables_that_are_no_weights_count_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative positions of a window transformer: four numbers of its window's side multiplied, and not saved."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("positions", torch.zeros(1000, 1000, dtype=torch.int64), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    monkeypatch.setattr(models, "build_spec", lambda *_, **__: Positions())
    assert footprint("any", 7, (3, 8, 8)).tables == 8_000_000


@pytest.mark.parametrize("model", ["simple_cnn", "resnet18", "alexnet"])
def test_the_quick_count_never_says_less(model: str) -> None:
    counted, most = (footprint(model, 7, (3, 64, 64), exactly=exactly) for exactly in (True, False))
    assert most[:2] == counted[:2]
    assert most.outputs >= counted.outputs
    assert most.largest >= counted.largest


def test_what_fits_by_far_is_not_counted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(module, "footprint", lambda *_, exactly: asked.append(exactly) or module.Footprint(1))
    monkeypatch.setattr(room, "available", lambda: 2**40)
    prepare(Config(model="simple_cnn", device="cpu"), federation=tiny.federation(side=16))
    assert asked == [False]
