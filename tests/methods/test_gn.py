from __future__ import annotations

import pytest
import torch
from torch import nn

from fedkeel import methods, models
from fedkeel.errors import FedkeelError, MethodError
from tests import tiny


@pytest.mark.parametrize(
    ("method", "width", "groups"),
    [("gn", 8, 2), ("gn(groups=4)", 8, 4), ("gn(groups=32)", 64, 32), ("gn(groups=32)", 16, 8)],
)
def test_group_norm_takes_the_place_of_batch_norm(method: str, width: int, groups: int) -> None:
    worker = tiny.setup(method, network=tiny.model(width=width)).worker
    norm = worker.model.encoder[1]  # type: ignore[index]
    assert isinstance(norm, nn.GroupNorm)
    assert (norm.num_groups, norm.num_channels) == (groups, width)
    assert worker.layout.statistics == []


@pytest.mark.parametrize(
    ("model", "method", "groups"),
    [
        ("digits_cnn", "gn(groups=32, doubled=encoder.bn3)", [(32, 64), (32, 64), (64, 128)]),
        (
            "alexnet",
            "gn(groups=32, doubled=[encoder.bn3, encoder.bn4, encoder.bn5])",
            [(32, 64), (32, 192), (64, 384), (64, 256), (64, 256)],
        ),
    ],
)
def test_fedwons_networks_have_the_groups_of_its_tables_6_and_7(
    model: str, method: str, groups: list[tuple[int, int]]
) -> None:
    with torch.device("meta"):
        network = models.build(model, num_classes=10)
        methods.build(method).prepare(network)
    norms = [module for module in network.modules() if isinstance(module, nn.GroupNorm)]
    assert [(norm.num_groups, norm.num_channels) for norm in norms] == groups


def test_a_layer_that_is_not_there_cannot_be_doubled() -> None:
    with pytest.raises(
        FedkeelError, match=r"'doubled' of gn names 'encoder.bn9', no batch norm here: did you mean 'encoder.1'"
    ):
        tiny.setup("gn(doubled=encoder.bn9)")


def test_without_batch_norm_there_is_nothing_to_replace() -> None:
    with pytest.raises(
        MethodError, match=r"'gn' acts on batch norm, and there is none to act on \(the model has none\)"
    ):
        tiny.setup("gn", network=tiny.model(norm=False))
