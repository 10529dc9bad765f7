"""The network for vectors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedkeel import models
from fedkeel.errors import FedkeelError


def test_it_has_so_many_layers_of_such_a_width_each_with_batch_norm() -> None:
    model = models.build_for("mlp(hidden=7, layers=3)", 4, (6,))
    assert [type(layer) for layer in model.encoder.layers] == [nn.Linear, nn.BatchNorm1d, nn.ReLU] * 3  # type: ignore[union-attr, arg-type]
    assert sum(p.numel() for p in model.parameters()) == (6 * 7 + 7 + 14) + 2 * (7 * 7 + 7 + 14) + 7 * 4 + 4
    output = model(torch.randn(5, 6))
    assert (output.features.shape, output.logits.shape) == ((5, 7), (5, 4))


def test_norm_and_dropout_are_options() -> None:
    model = models.build_for("mlp(norm=none, dropout=0.2)", 4, (6,))
    assert [type(layer) for layer in model.encoder.layers][:3] == [nn.Linear, nn.ReLU, nn.Dropout]  # type: ignore[union-attr, arg-type]
    assert not any(isinstance(module, nn.BatchNorm1d) for module in model.modules())


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 9), (5,)])
def test_what_is_no_vector_is_flattened(shape: tuple[int, ...]) -> None:
    assert models.build_for("mlp", 4, shape)(torch.randn(2, *shape)).logits.shape == (2, 4)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("mlp(hidden=0)", "'hidden' .* is 0: give at least 1"),
        ("mlp(layers=x)", "is not a whole number"),
        ("mlp(norm=layer)", "'norm' .* is 'layer'"),
        ("mlp(dropout=1)", "'dropout' .* is 1"),
        ("mlp(projector=0)", "projector is 0"),
    ],
)
def test_wrong_options_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(FedkeelError, match=sentence):
        models.build_for(text, 4, (6,))


def test_images_of_another_size_are_refused() -> None:
    with pytest.raises(FedkeelError, match="built for images of 8 x 8 px and got 4 x 4"):
        models.build_for("mlp", 4, (3, 8, 8))(torch.zeros(1, 3, 4, 4))
