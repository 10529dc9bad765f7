"""Scaled weight standardisation against FedWon's Eq. 3 and Listing 1, computed independently in NumPy."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedkeel import models
from fedkeel.errors import FedkeelError, MethodError
from fedkeel.nn import ScaledWSConv2d, fold, remove_normalisation, to_scaled_ws


def by_hand(convolution: Any) -> np.ndarray:
    weight = convolution.weight.detach().double().numpy()
    standardised = np.empty_like(weight)
    for i, row in enumerate(weight):
        n = row.size
        mean = sum(row.flat) / n
        var = sum((w - mean) ** 2 for w in row.flat) / (n - 1)
        standardised[i] = (row - mean) / math.sqrt(max(var * n, 1e-4)) * convolution.gain[i].item()
    return standardised


@pytest.mark.parametrize(
    "convolution",
    [
        ScaledWSConv2d(3, 8, 3, padding=1),
        ScaledWSConv2d(6, 6, 3, groups=6, bias=False),
        ScaledWSConv2d(4, 6, (1, 5), stride=2, groups=2, padding=2, padding_mode="reflect"),
        ScaledWSConv2d(3, 4, 5, dilation=2),
    ],
    ids=lambda c: str(c),
)
def test_weights_are_standardised_as_in_listing_1(convolution: Any) -> None:
    nn.init.normal_(convolution.gain)
    np.testing.assert_allclose(convolution.standardised_weight().detach(), by_hand(convolution), rtol=1e-4, atol=1e-6)
    x = torch.randn(2, convolution.in_channels, *[9] * (convolution.weight.ndim - 2))
    torch.testing.assert_close(convolution.fold()(x), convolution(x))
    assert type(convolution.fold()) is convolution.plain


def test_a_fan_in_of_one_is_used_as_it_is() -> None:
    convolution = ScaledWSConv2d(4, 4, 1, groups=4)
    nn.init.constant_(convolution.gain, 3.0)
    torch.testing.assert_close(convolution.standardised_weight(), 3 * convolution.weight)


def test_gain_starts_at_one_and_all_parts_get_gradients() -> None:
    convolution = ScaledWSConv2d(2, 3, 3).double()
    assert torch.equal(convolution.gain, torch.ones_like(convolution.gain))
    assert convolution.gain.numel() == 3

    def forward(x: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(convolution, {"weight": weight, "gain": gain}, (x,))
        return out

    x = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(forward, (x, convolution.weight, convolution.gain))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["simple_cnn", "resnet10"])
def test_a_folded_network_gives_the_same_outputs(name: str) -> None:
    model = models.build(name, num_classes=3, image_size=32)
    remove_normalisation(model)
    changed = to_scaled_ws(model)
    for module_name in changed:
        nn.init.uniform_(model.get_submodule(module_name).gain, 0.5, 1.5)
    model.eval()
    folded = fold(model)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(folded(x).logits, model(x).logits)
    assert not [n for n in folded.state_dict() if n.endswith("gain")]
    assert [n for n in model.state_dict() if n.endswith("gain")]
    assert not any(isinstance(m, ScaledWSConv2d) for m in folded.modules())


def test_named_convolutions_stay_plain_as_in_fedwons_alexnet() -> None:
    model = models.build("simple_cnn", num_classes=3)
    kept = model.encoder.conv3
    assert to_scaled_ws(model, skip=("encoder.conv3",)) == ["encoder.conv1", "encoder.conv2"]
    assert model.encoder.conv3 is kept


def test_mistakes_are_refused() -> None:
    model = models.build("simple_cnn", num_classes=3)
    with pytest.raises(FedkeelError, match=r"did you mean 'encoder\.conv3'"):
        to_scaled_ws(model, skip=("encoder.conv33",))
    with pytest.raises(MethodError, match="no convolution"):
        to_scaled_ws(nn.Sequential(nn.Linear(2, 2)))


class Same(nn.Conv2d):
    """Pads in its own forward, as timm's convolutions for TensorFlow's weights do, and knows it nowhere else."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.margin = self.kernel_size[0] // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.pad(x, [self.margin] * 4))


@pytest.mark.parametrize("bias", [True, False])
def test_a_convolution_with_a_forward_of_its_own_keeps_it(bias: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Same(3, 4, 5, bias=bias), nn.BatchNorm2d(4))
    x, expected = torch.randn(2, 3, 9, 9), Same(3, 4, 5, bias=bias)
    assert to_scaled_ws(model, init="keep") == ["0"]
    with torch.no_grad():
        expected.weight.copy_(model[0].standardised_weight())
        if bias:
            expected.bias.copy_(model[0].bias)
    torch.testing.assert_close(model[0](x), expected(x))
    remove_normalisation(model)  # gives it a bias, which must be used
    nn.init.constant_(model[0].bias, 0.5)
    torch.testing.assert_close(model(x), expected(x) + 0.5 - (expected.bias.view(1, -1, 1, 1) if bias else 0))

    assert sorted(model.state_dict()) == ["0.bias", "0.gain", "0.weight"]
    assert [type(m) for m in model.modules()] == [nn.Sequential, ScaledWSConv2d, nn.Identity]
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        nn.init.constant_(other[0].gain, 2.0)
        torch.testing.assert_close(other(x) - 0.5, 2 * (model(x) - 0.5))
    assert type(fold(model)[0]) is Same
    torch.testing.assert_close(fold(model)(x), model(x))
    assert sorted(fold(model).state_dict()) == ["0.bias", "0.weight"]
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.usefixtures("timm_ready")
def test_timm_networks_with_same_padding_keep_their_shapes() -> None:
    """tf_efficientnet_lite0 at 96 px once lost its padding, and with it the whole image before the last stage."""
    model = models.build_spec("timm:tf_efficientnet_lite0", num_classes=7, in_channels=3, image_size=(96, 96))
    shapes: list[list[torch.Size]] = [[], []]
    x = torch.randn(2, 3, 96, 96)
    for seen in shapes:
        hooks = [
            module.register_forward_hook(lambda _, __, y, seen=seen: seen.append(y.shape))
            for module in model.modules()
            if isinstance(module, nn.Conv2d)
        ]
        model.eval()(x)
        for hook in hooks:
            hook.remove()
        to_scaled_ws(model)
        remove_normalisation(model)
    assert shapes[0] == shapes[1]
    assert len(shapes[0]) == 49


def test_without_convolutions_the_rows_of_the_layers_below_the_head_are_standardised() -> None:
    model = models.build("mlp", num_classes=3, in_channels=6, hidden=5, layers=2)
    assert to_scaled_ws(model, init="keep") == ["encoder.layers.0", "encoder.layers.3"]
    assert type(model.head) is nn.Linear
    layer = model.encoder.get_submodule("layers.0")
    x = torch.randn(4, 6)
    w = layer.weight.detach().double().numpy()
    by_hand = (w - w.mean(1, keepdims=True)) / np.sqrt(np.maximum(w.var(1, ddof=1, keepdims=True) * 6, 1e-4))
    expected = x.double() @ torch.from_numpy(by_hand).T + layer.bias.double()
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-5)
    model.eval()
    folded = fold(model)
    assert type(folded.get_submodule("encoder.layers.0")) is nn.Linear
    torch.testing.assert_close(folded(x).logits, model(x).logits)
