from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fedkeel import methods, models
from fedkeel.methods.fedfn import normalise_features
from fedkeel.nn.surgery import batch_norms
from tests.methods.small import small_model


def lengths(rows: Tensor) -> Tensor:
    return rows.flatten(1).double().square().sum(dim=1).sqrt()


@pytest.mark.parametrize("training", [True, False])
def test_features_before_the_head_have_length_sqrt_d_and_no_normalisation_is_left(training):
    model = small_model().train(training)
    names = set(small_model().state_dict())
    methods.build("fedfn").prepare(model)
    output = model(torch.rand(5, 3, 8, 8))
    torch.testing.assert_close(lengths(output.features), torch.full((5,), math.sqrt(8)).double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(model.head(output.features), output.logits)
    assert not batch_norms(model)
    assert set(model.state_dict()) == {name for name in names if not name.startswith(("encoder.1.", "encoder.6."))}


def test_hbn_has_it_before_the_first_fully_connected_layer():
    model = models.build("simple_cnn", num_classes=4, image_size=32)
    seen: list[Tensor] = []
    methods.build("fedfn(before=fully-connected)").prepare(model)
    model.encoder.fc1.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    output = model(torch.rand(3, 3, 32, 32))
    assert seen[0].shape == (3, 1024)
    torch.testing.assert_close(lengths(seen[0]), torch.full((3,), 32.0).double(), rtol=1e-5, atol=0)
    assert not torch.allclose(lengths(output.features), torch.full((3,), math.sqrt(128)).double())
    # where the head is that layer, it is the same as before the head
    resnet = models.build("resnet10", num_classes=4, stem="small")
    methods.build("fedfn(before=fully-connected)").prepare(resnet)
    wanted = torch.full((2,), math.sqrt(512)).double()
    torch.testing.assert_close(lengths(resnet(torch.rand(2, 3, 16, 16)).features), wanted, rtol=1e-5, atol=0)


def test_a_wrapped_network_is_normalised_before_its_head():
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    model = models.wrap(network, head="4")
    methods.build("fedfn").prepare(model)
    output = model(torch.rand(4, 3, 2, 2))
    torch.testing.assert_close(lengths(output.features), torch.full((4,), math.sqrt(6)).double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(network[4].weight @ output.features[0] + network[4].bias, output.logits[0])


def test_the_formula_by_hand_and_a_feature_without_direction():
    rows = torch.tensor([[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], requires_grad=True)
    result = normalise_features(rows)
    torch.testing.assert_close(result.detach(), torch.tensor([[1.2, 1.6, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    result.square().sum().backward()
    assert torch.isfinite(rows.grad).all()
