"""The networks have the shapes and sizes of the papers, and what cannot be built is refused in one sentence."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedkeel import models
from fedkeel.errors import FedkeelError
from fedkeel.models import Output

TRAINED = [
    *((name, size) for name in ("simple_cnn", "small_cnn(width=2)") for size in (28, 64)),
    *(("digits_cnn(dropout=0)", 28), ("resnet10", 64), ("resnet10(stem=small)", 28), ("mlp", 8)),
]
EVALUATED = [("digits_cnn", 32), ("resnet18", 32), ("resnet18(stem=nopool)", 96), ("alexnet", 64)]


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
    ],
)
def test_the_number_of_parameters_is_the_papers(spec: str, classes: int, parameters: int) -> None:
    assert count(models.build_spec(spec, num_classes=classes)) == parameters


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


def test_the_smallest_image_works() -> None:
    model = models.build("simple_cnn", num_classes=2, image_size=8).eval()
    assert model(torch.randn(1, 3, 8, 8)).logits.shape == (1, 2)


@pytest.mark.parametrize(
    ("spec", "shape", "sentence"),
    [
        ("simple_cnn", (3, 7, 7), r"Images of \(7, 7\) px are too small"),
        ("resnet18(stam=small)", (3, 8, 8), "has no option 'stam': did you mean 'stem'"),
        ("resnet18(stem=smal)", (3, 8, 8), "The 'stem' of resnet18 is 'smal': did you mean 'small'"),
        ("resnet81", (3, 8, 8), "no model named 'resnet81'.* did you mean '.*resnet18'"),
        ("simple_cnn(projector=0)", (3, 8, 8), "The 'projector' of simple_cnn is 0: give at least 1"),
        ("simple_cnn(num_classes=3)", (3, 8, 8), "follows from the data"),
        ("simple_cnn", (0, 8, 8), "'in_channels' is 0: give at least 1"),
        ("mlp(hidden=0)", (6,), "'hidden' .* is 0: give at least 1"),
        ("mlp(norm=layer)", (6,), "'norm' .* is 'layer'"),
        ("mlp(dropout=1)", (6,), "'dropout' .* is 1"),
    ],
)
def test_what_cannot_be_built_is_refused(spec: str, shape: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(FedkeelError, match=sentence):
        models.build_for(spec, 4, shape)


@pytest.mark.parametrize("spec", ["simple_cnn", "mlp"])
def test_images_of_another_size_than_built_for_are_refused(spec: str) -> None:
    with pytest.raises(FedkeelError, match=r"built for image_size=\(32, 32\) and got \(64, 64\)"):
        models.build(spec, num_classes=2, image_size=32)(torch.randn(1, 3, 64, 64))


def test_a_network_for_vectors_has_so_many_layers_of_such_a_width() -> None:
    model = models.build_for("mlp(hidden=7, layers=3)", 4, (6,))
    assert [type(layer) for layer in model.encoder.layers] == [nn.Linear, nn.BatchNorm1d, nn.ReLU] * 3  # type: ignore[union-attr, arg-type]
    output = model(torch.randn(5, 6))
    assert (output.features.shape, output.logits.shape) == ((5, 7), (5, 4))
    model = models.build_for("mlp(norm=none, dropout=0.2)", 4, (6,))
    assert [type(layer) for layer in model.encoder.layers][:3] == [nn.Linear, nn.ReLU, nn.Dropout]  # type: ignore[union-attr, arg-type]
    assert models.build_for("mlp", 4, (2, 9))(torch.randn(2, 2, 9)).logits.shape == (2, 4)


def test_every_network_says_what_it_is_and_where_it_comes_from() -> None:
    assert {"simple_cnn", "digits_cnn", "alexnet", "small_cnn", "resnet10", "resnet18", "mlp"} <= {
        *models.MODELS.names()
    }
    for entry in models.MODELS:
        assert entry.summary.endswith(".")
        assert entry.paper
        assert {"num_classes", "in_channels", "image_size", "projector"} <= entry.options().keys()


def test_the_same_seed_gives_the_same_weights() -> None:
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(models.build("resnet10", num_classes=4).state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


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
