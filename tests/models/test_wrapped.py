"""Any network can be used as a classifier by naming its head."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel import models
from fedkeel.errors import FedkeelError
from fedkeel.nn import replace_modules


class Own(nn.Module):
    """Does things before and after its head, as users' networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.classifier = nn.Sequential(nn.Dropout(0.0), nn.Linear(6, 4))
        self.unused = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        features = 2 * self.body(x).mean(dim=(2, 3))
        return F.log_softmax(self.classifier(features), dim=1)


def test_features_are_what_enters_the_head_and_logits_what_the_network_returns() -> None:
    network = Own().eval()
    model = models.wrap(network, head="classifier", num_classes=4)
    x = torch.randn(5, 3, 8, 8)
    features = 2 * network.body(x).mean(dim=(2, 3))
    output = model(x)
    assert torch.equal(output.features, features)
    assert torch.equal(output.logits, network(x))
    assert (model.feature_dim, model.num_classes) == (6, 4)
    assert model.head is network.classifier
    assert torch.equal(model.encoder(x), features)


def test_names_are_the_networks_own_and_each_appears_once() -> None:
    network = Own()
    model = models.wrap(network, head="classifier.1")
    assert list(model.state_dict()) == [f"network.{name}" for name in network.state_dict()]
    assert isinstance(model, models.Classifier)


def test_a_copy_is_independent() -> None:
    model = models.wrap(Own(), head="classifier", num_classes=4).eval()
    clone = copy.deepcopy(model)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        clone.network.body[0].weight.zero_()
        before = model(x)
        assert not torch.equal(clone(x).features, before.features)
    assert clone.head is not model.head
    assert not any(module._forward_pre_hooks for module in clone.modules())


def test_a_replaced_head_is_followed() -> None:
    model = models.wrap(Own(), head="classifier.1", num_classes=4)
    replace_modules(model, lambda name, _: name == "network.classifier.1", lambda _n, _m: nn.Linear(6, 9))
    assert model(torch.randn(1, 3, 8, 8)).logits.shape == (1, 9)


def test_logits_are_found_in_what_networks_of_hugging_face_return() -> None:
    class Returning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> models.Output:
            return models.Output(x, self.fc(input=x.mean(dim=(2, 3))))

    model = models.wrap(Returning())
    assert model(torch.randn(5, 3, 4, 4)).logits.shape == (5, 2)
    assert (model.feature_dim, model.num_classes) == (3, 2)


@pytest.mark.parametrize(
    ("head", "classes", "sentence"),
    [
        ("clasifier", None, "no module named 'clasifier': did you mean 'classifier'"),
        ("unused", None, "never calls its head 'unused'"),
        ("classifier", 10, "The head 'classifier' has 4 outputs"),
        ("body.2", None, r"The head 'body\.2' has no linear layer"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(head: str, classes: int | None, sentence: str) -> None:
    with pytest.raises(FedkeelError, match=sentence):
        models.wrap(Own(), head, classes)(torch.randn(1, 3, 8, 8))
