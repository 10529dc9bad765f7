"""The networks have the shapes and sizes of the papers, at every image size that they are used with."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedkeel import models
from fedkeel.errors import FedkeelError
from fedkeel.models import Output
from fedkeel.nn import batch_norms

TRAINED = [
    *((name, size) for name in ("simple_cnn", "moon_cnn", "small_cnn") for size in (28, 32, 64)),
    ("digits_cnn(dropout=0)", 28),
    ("resnet10", 64),
    ("resnet10(stem=small)", 28),
    ("mobilenetv2", 64),
]
EVALUATED = [
    ("digits_cnn", 32),
    ("resnet18", 32),
    ("resnet18(stem=nopool)", 96),
    ("resnet50", 64),
    ("small_cnn(width=2)", 96),
    ("simple_cnn(width=8)", 128),
    ("alexnet", 64),
]


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.fixture(autouse=True)
def _no_random_weights(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and names do not depend on the weights; drawing tens of millions of them takes seconds."""
    if "trains" not in request.node.name:
        monkeypatch.setattr(nn.init, "kaiming_normal_", lambda tensor, *_, **__: tensor.data.fill_(0.01))
        monkeypatch.setattr(nn.init, "kaiming_uniform_", lambda tensor, *_, **__: tensor.data.fill_(0.01))


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "size"), TRAINED)
def test_a_network_gives_features_and_logits_and_trains(spec: str, size: int) -> None:
    model = models.build_spec(spec, num_classes=7, image_size=size)
    output = model(torch.randn(2, 3, size, size))
    assert isinstance(output, Output)
    assert output.features.shape == (2, model.feature_dim)
    assert output.logits.shape == (2, 7)
    assert torch.equal(output.logits, model.head(output.features))
    nn.functional.cross_entropy(output.logits, torch.tensor([0, 6])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("spec", "size"), EVALUATED)
def test_larger_networks_run_forward(spec: str, size: int) -> None:
    model = models.build_spec(spec, num_classes=3, image_size=size).eval()
    with torch.no_grad():
        output = model(torch.randn(1, 3, size, size))
    assert output.features.shape == (1, model.feature_dim)
    assert output.logits.shape == (1, 3)


@pytest.mark.parametrize(
    ("spec", "classes", "parameters"),
    [
        # layer by layer from HBN Table 7
        ("simple_cnn", 10, 448 + 4640 + 18496 + 2 * (16 + 32 + 64) + 131200 + 1290),
        # layer by layer from FedWon Table 6
        ("digits_cnn", 10, 4864 + 102464 + 204928 + 2 * (64 + 64 + 128) + 12847104 + 1049088 + 5130),
        # torchvision's AlexNet has 61,100,840 with 1000 classes; five batch norms come on top
        ("alexnet", 1000, 61_100_840 + 2 * (64 + 192 + 384 + 256 + 256)),
        # torchvision's numbers with 1000 classes
        ("resnet18", 1000, 11_689_512),
        ("resnet34", 1000, 21_797_672),
        ("resnet50", 1000, 25_557_032),
        ("mobilenetv2", 1000, 3_504_872),
        # LeNet-5 on three channels
        ("moon_cnn", 10, 62_006),
    ],
)
def test_the_number_of_parameters_is_the_papers(spec: str, classes: int, parameters: int) -> None:
    assert count(models.build_spec(spec, num_classes=classes)) == parameters


def test_digits_cnn_flattens_to_6272_at_28_px() -> None:
    model = models.build("digits_cnn", num_classes=10, image_size=28)
    assert model.get_submodule("encoder.fc1").in_features == 6272


def test_resnet18_has_twenty_batch_norms_as_greg_says() -> None:
    assert len(batch_norms(models.build("resnet18", num_classes=10))) == 20


def test_parameters_have_torchvisions_names() -> None:
    resnet = models.build("resnet50", num_classes=10).encoder.state_dict()
    assert {
        "conv1.weight",
        "bn1.running_mean",
        "layer1.0.downsample.1.weight",
        "layer4.2.conv3.weight",
    } <= resnet.keys()
    mobilenet = models.build("mobilenetv2", num_classes=10).encoder.state_dict()
    assert {"features.0.0.weight", "features.1.conv.0.0.weight", "features.2.conv.3.running_var"} <= mobilenet.keys()
    assert "features.18.1.weight" in mobilenet


def test_the_small_stem_keeps_the_resolution() -> None:
    for spec, side in [("resnet10(stem=small)", 4), ("resnet10(stem=nopool)", 2), ("resnet10", 1)]:
        encoder = models.build_spec(spec, num_classes=2).encoder
        maps: list[torch.Tensor] = []
        encoder.layer4.register_forward_hook(lambda _m, _x, y, maps=maps: maps.append(y))
        encoder.eval()(torch.randn(1, 3, 32, 32))
        assert maps[0].shape[-2:] == (side, side)


@pytest.mark.parametrize("spec", ["simple_cnn", "resnet10", "small_cnn"])
def test_a_projector_becomes_the_source_of_the_features_and_changes_no_name(spec: str) -> None:
    plain = models.build_spec(spec, num_classes=5, image_size=32)
    projected = models.build_spec(f"{spec}(projector=24)", num_classes=5, image_size=32)
    assert projected.feature_dim == 24
    features = projected(torch.randn(4, 3, 32, 32)).features
    assert features.shape == (4, 24)
    assert (features >= 0).all()
    extra = {n for n in projected.state_dict() if n not in plain.state_dict()}
    assert all(name.startswith("encoder.projector.") for name in extra)
    assert len([m for m in projected.encoder.projector.modules() if isinstance(m, nn.BatchNorm1d)]) == 2


def test_grey_and_oblong_images() -> None:
    model = models.build("simple_cnn", num_classes=2, in_channels=1, image_size=(16, 40))
    assert model(torch.randn(2, 1, 16, 40)).logits.shape == (2, 2)


@pytest.mark.parametrize(("spec", "smallest"), [("simple_cnn", 8), ("digits_cnn", 4), ("moon_cnn", 16)])
def test_the_smallest_image_works_and_one_pixel_less_is_refused(spec: str, smallest: int) -> None:
    model = models.build_spec(spec, num_classes=2, image_size=smallest).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, smallest, smallest)).logits.shape == (1, 2)
    less = smallest - 1
    with pytest.raises(FedkeelError, match=f"Images of {less} x {less} px are too small for this network"):
        models.build_spec(spec, num_classes=2, image_size=less)


def test_images_of_another_size_than_built_for_are_refused_in_words() -> None:
    model = models.build("simple_cnn", num_classes=2, image_size=32)
    with pytest.raises(FedkeelError, match="built for images of 32 x 32 px and got 64 x 64"):
        model(torch.randn(1, 3, 64, 64))


def test_dropout_can_be_chosen() -> None:
    model = models.build("digits_cnn", num_classes=2, dropout=0.0)
    x = torch.randn(2, 3, 28, 28)
    assert torch.equal(model(x).logits, model(x).logits)


@pytest.mark.parametrize(("size", "stride"), [(2, None), (3, 2)])
def test_relu_behind_the_pooling_changes_no_bit(size: int, stride: int | None) -> None:
    """Which is why the small networks have it there. On a coarse grid: many equal maxima, many windows below 0."""
    grid = torch.randint(-4, 3, (5, 6, 13, 13), generator=torch.Generator().manual_seed(3)).float()
    results = []
    for pooled in (lambda x: F.relu_(F.max_pool2d(x, size, stride)), lambda x: F.max_pool2d(F.relu(x), size, stride)):
        x = grid.clone().requires_grad_()
        y = pooled(x)
        weights = torch.linspace(-1, 1, y.numel()).view_as(y)
        (gradient,) = torch.autograd.grad((y * weights).sum(), x)
        results.append((y.detach(), gradient))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert (results[0][0] == 0).any()
    assert (results[0][0] > 0).any()
