"""Models are built by name, and what cannot be built is refused in one sentence."""

from __future__ import annotations

import copy

import pytest
import torch

from fedkeel import models
from fedkeel.errors import FedkeelError


def test_every_network_says_what_it_is_and_where_it_comes_from() -> None:
    assert {"simple_cnn", "digits_cnn", "alexnet", "resnet10", "resnet18", "resnet50", "mobilenetv2"} <= set(
        models.names()
    )
    for entry in models.MODELS:
        assert entry.summary.endswith(".")
        assert entry.paper
        assert {"num_classes", "in_channels", "image_size", "projector"} <= entry.options().keys()


def test_options_of_a_spec_reach_the_network() -> None:
    model = models.build_spec("simple_cnn(width=4, projector=6)", num_classes=3, image_size=32)
    assert model.encoder.conv1.out_channels == 4
    assert (model.feature_dim, model.num_classes) == (6, 3)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("resnet18(stam=small)", "has no option 'stam': did you mean 'stem'"),
        ("resnet18(stem=smal)", "The 'stem' of resnet18 is 'smal': did you mean 'small'"),
        ("resnet81", "no model named 'resnet81'.* did you mean '.*resnet18'"),
        ("simple_cnn(projector=0)", "projector is 0"),
        ("simple_cnn(num_classes=3)", "follows from the data"),
    ],
)
def test_a_mistyped_model_is_refused_in_one_sentence(spec: str, message: str) -> None:
    with pytest.raises(FedkeelError, match=message):
        models.build_spec(spec, num_classes=3)


@pytest.mark.parametrize(
    "options", [{"num_classes": 1}, {"num_classes": 3, "in_channels": 0}, {"num_classes": 3, "image_size": (3, 2, 1)}]
)
def test_impossible_shapes_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(FedkeelError):
        models.build("simple_cnn", **options)


def test_the_same_seed_gives_the_same_weights() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(models.build("resnet10", num_classes=4).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_models_can_be_copied() -> None:
    model = models.build_spec("small_cnn(projector=8)", num_classes=4).eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(copy.deepcopy(model)(x).logits, model(x).logits)


def test_a_network_of_the_users_own_becomes_a_model() -> None:
    @models.network("linear_of_test", paper="none")
    class LinearEncoder(models.Encoder):
        """A linear layer."""

        def __init__(self, in_channels: int = 3, width: int = 5) -> None:
            super().__init__(feature_dim=width)
            self.layer = torch.nn.Linear(in_channels, width)

        def extract(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x.mean(dim=(2, 3)))

    try:
        model = models.build_spec("linear_of_test(width=9)", num_classes=2, image_size=8)
        assert model(torch.randn(4, 3, 8, 8)).features.shape == (4, 9)
    finally:
        del models.MODELS._entries["linear_of_test"]
