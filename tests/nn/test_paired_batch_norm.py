"""Which ReLUs a pair's batch norms compute themselves, found by running the network."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedkeel import models
from fedkeel.nn import batch_norms, kernels
from fedkeel.nn.paired_batch_norm import Pairing, find_pairing, naive


class Encoder(nn.Module):
    """A batch norm whose output is read by its ReLU alone, or by a skip too, or by a ReLU that others use."""

    def __init__(self, skip: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=not skip)
        self.skip, self.shared = skip, shared

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        z = self.relu(y) + y if self.skip else self.relu(y)
        return (self.relu(z - 1) if self.shared else z).mean(dim=(2, 3))


def classifier(encoder: nn.Module) -> models.Classifier:
    return models.Classifier(encoder, nn.Linear(4, 3), 4, 3)


@pytest.mark.parametrize(
    ("options", "relus"), [({}, {"encoder.bn": "encoder.relu"}), ({"skip": True}, {}), ({"shared": True}, {})], ids=str
)
def test_a_relu_joins_its_batch_norm_where_nothing_else_reads_between_them(
    options: dict[str, bool], relus: dict[str, str]
) -> None:
    pairing = find_pairing(classifier(Encoder(**options)), torch.randn(3, 3, 5, 5))
    assert pairing == Pairing((False,), relus)


@pytest.mark.parametrize(
    ("name", "count"), [("resnet10(stem=small)", 5), ("resnet50", 33), ("small_cnn", 8), ("vgg11(hidden=0)", 8)]
)
@pytest.mark.slow
def test_the_relus_of_the_networks_here_are_found(name: str, count: int) -> None:
    torch.manual_seed(0)
    model = models.build_spec(name, num_classes=3)
    pairing = find_pairing(model, torch.randn(2, 3, 32, 32))
    assert isinstance(pairing, Pairing)
    assert len(pairing.relus) == count


def test_with_and_without_the_relus_every_bit_is_the_same() -> None:
    torch.manual_seed(0)
    model = models.build_spec("resnet10(stem=small)", num_classes=3)
    x, norms = torch.randn(4, 3, 8, 8), batch_norms(model)
    pairing = find_pairing(model, x)
    assert isinstance(pairing, Pairing)
    statistics = {f"{name}.running_mean": torch.rand_like(norm.running_mean) for name, norm in norms.items()}
    results = []
    for off in ((), ("paired-relu",)):
        with kernels.without(*off):
            results.append(pairing.run(model, norms, statistics, x))
    for one, other, plain in zip(*results, naive(model, norms, statistics, x), strict=True):
        assert torch.equal(one.logits, other.logits)
        torch.testing.assert_close(one.logits, plain.logits, rtol=1e-4, atol=1e-4)
    assert not any("forward" in vars(module) for module in model.modules())
