"""timm's networks have the interface of ours, and its absence is said in words."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from fedkeel import models
from fedkeel.errors import FedkeelError
from fedkeel.models import timm_models
from fedkeel.nn import batch_norms, remove_normalisation, to_group_norm, to_hybrid


@pytest.fixture(autouse=True)
def _installed() -> None:
    """What installed packages add is looked for now, and not while the tests replace the import."""
    models.MODELS.names()


@pytest.mark.slow
@pytest.mark.usefixtures("timm_ready")
@pytest.mark.parametrize(
    "name",
    ["resnet18", "mobilenetv2_100", "efficientnet_b0", "densenet121", "levit_128s", "mobilevit_s", "vgg11_bn"],
)
def test_the_networks_of_greg_table_4_run_and_train(name: str) -> None:
    size = 64
    options = {"drop_rate": 0.0} if name != "vgg11_bn" else {}
    model = models.build(f"timm:{name}", num_classes=5, image_size=size, **options)
    output = model(torch.randn(2, 3, size, size))
    assert output.features.shape == (2, model.feature_dim)
    assert output.logits.shape == (2, 5)
    output.logits.sum().backward()
    assert len(batch_norms(model)) > 5 or name == "vgg11_bn"


@pytest.mark.usefixtures("timm_ready")
def test_a_projector_and_grey_images_work_with_timm_too() -> None:
    model = models.build_spec("timm:resnet18(projector=16)", num_classes=5, in_channels=1, image_size=32)
    assert model(torch.randn(2, 1, 32, 32)).features.shape == (2, 16)


@pytest.mark.slow
@pytest.mark.usefixtures("timm_ready")
def test_surgery_keeps_the_activations_that_live_inside_timms_norms() -> None:
    # efficientnet's batch norms apply SiLU themselves
    for operate in (to_group_norm, to_hybrid, remove_normalisation):
        model = models.build("timm:efficientnet_b0", num_classes=3, image_size=32)
        before = sum(isinstance(m, torch.nn.SiLU) for m in model.modules())
        operate(model)
        assert sum(isinstance(m, torch.nn.SiLU) for m in model.modules()) == before > 0
        assert not batch_norms(model)
        assert model(torch.randn(2, 3, 32, 32)).logits.shape == (2, 3)


@pytest.mark.usefixtures("timm_ready")
def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(FedkeelError, match=r"timm has no model named .* did you mean .*'efficientnet_b0'"):
        models.build("timm:eficientnet_b0", num_classes=3)
    with pytest.raises(FedkeelError, match="did you mean 'simple_cnn'"):
        models.build("simple_cn", num_classes=3)
    with pytest.raises(FedkeelError, match=r"no model named 'resnet26d' \(timm's are written 'timm:NAME'\): "):
        models.build("resnet26d", num_classes=3)


def test_without_timm_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(timm_models.importlib, "import_module", refuse)
    with pytest.raises(FedkeelError, match=r"needs timm, .* \(No module named 'timm'\): pip install 'fedkeel\[timm\]'"):
        models.build("timm:resnet18", num_classes=3)


class Recorded(ModuleType):
    """A timm that says what it was asked to make."""

    def __init__(self) -> None:
        super().__init__("timm")
        self.asked: list[tuple[str, dict[str, object]]] = []

    def is_model(self, name: str) -> bool:
        return name.startswith("resnet")

    def list_models(self) -> list[str]:
        return ["resnet10t", "resnet18"]

    def create_model(self, name: str, **options: object) -> torch.nn.Module:
        self.asked.append((name, options))
        return torch.nn.Flatten()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    timm = Recorded()
    monkeypatch.setattr(timm_models.importlib, "import_module", lambda _: timm)
    return timm


@pytest.mark.parametrize(
    "options",
    [
        "checkpoint_path=/etc/shadow",
        "pretrained_cfg={'url': 'https://example.org/w.pth'}",
        "cache_dir=/tmp",
        "features_only=true",
        "img_size=64",
        "pretrained='https://example.org'",
        "act_layer=/etc/passwd",
        "act_layer={'a': 1}",
        "norm_layer=" + 60 * "x",
        "layers=[1000000000, 1]",
        "depth=4097",
        "drop_rate=1e400",
        "depth=0x" + 5000 * "f",
        f"layers={[1] * 17}",
    ],
)
def test_only_options_that_describe_an_architecture_reach_timm(recorded: Recorded, options: str) -> None:
    with pytest.raises(FedkeelError, match=r"^The option '.*' of 'timm:resnet10t'") as refused:
        models.build_spec(f"timm:resnet10t({options})", num_classes=3, image_size=8)
    assert len(str(refused.value)) < 500
    assert not recorded.asked


@pytest.mark.parametrize(
    "name",
    [
        "timm:hf-hub:timm/resnet18",
        "hf-hub:timm/resnet18",
        "timm:local-dir:resnet18",
        "timm:/etc/shadow",
        "timm:resnet18.a/../../b",
        "timm:resnet18.",
    ],
)
def test_names_that_timm_would_read_or_fetch_from_are_none(recorded: Recorded, name: str) -> None:
    with pytest.raises(FedkeelError, match="no model named"):
        models.build(name, num_classes=3, image_size=8)
    assert not recorded.asked


def test_an_architecture_and_its_pretrained_weights_can_be_asked_for(recorded: Recorded) -> None:
    spec = "timm:resnet18.tv_in1k(pretrained=true, drop_rate=0.1, layers=[1, 1, 1, 1], act_layer=gelu)"
    models.build_spec(spec, num_classes=3, image_size=8)
    name, options = recorded.asked[-1]
    assert name == "resnet18.tv_in1k"
    chosen = {"pretrained": True, "drop_rate": 0.1, "layers": [1, 1, 1, 1], "act_layer": "gelu"}
    assert options == {"img_size": (8, 8), "num_classes": 0, "in_chans": 3, **chosen}


@pytest.mark.usefixtures("timm_ready")
def test_every_allowed_option_is_one_of_timms() -> None:
    """A name that no network takes would be a hole that somebody may find a use for."""
    import inspect
    import sys

    import timm.models  # noqa: F401

    modules = [module for name, module in sys.modules.items() if name.startswith("timm.models.")]
    classes = {c for module in modules for c in vars(module).values() if inspect.isclass(c)}
    taken = {name for c in classes if issubclass(c, torch.nn.Module) for name in inspect.signature(c).parameters}
    assert set(timm_models.OPTIONS) <= taken


@pytest.mark.parametrize(
    ("weights", "model", "built"),
    [
        ("pretrained", "timm:resnet18", "timm:resnet18(pretrained=True)"),
        ("a1_in1k", "timm:resnet18(drop_rate=0.1)", "timm:resnet18.a1_in1k(drop_rate=0.1, pretrained=True)"),
        ("nowhere.pth", "timm:resnet18", "timm:resnet18"),
    ],
)
def test_weights_with_a_name_are_timm_s(weights: str, model: str, built: str) -> None:
    assert timm_models.with_weights(model, weights) == built


def test_a_network_of_another_kind_has_no_weights_with_a_name() -> None:
    with pytest.raises(FedkeelError, match="weights with a name are those of timm, for --model timm:NAME"):
        timm_models.with_weights("simple_cnn", "imagenet")
