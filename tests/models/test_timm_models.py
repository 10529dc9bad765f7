"""timm's networks have the interface of ours, and its absence is said in words."""

from __future__ import annotations

import builtins
from types import ModuleType

import pytest
import torch

from fedkeel import models
from fedkeel.errors import FedkeelError
from fedkeel.models import timm_models
from fedkeel.nn import batch_norms, remove_normalisation, to_group_norm, to_hybrid


@pytest.mark.slow
@pytest.mark.usefixtures("timm_ready")
@pytest.mark.parametrize(
    "name",
    ["timm:resnet18", "mobilenetv2_100", "efficientnet_b0", "densenet121", "levit_128s", "mobilevit_s", "vgg11_bn"],
)
def test_the_networks_of_greg_table_4_run_and_train(name: str) -> None:
    size = 64
    options = {"drop_rate": 0.0} if name != "vgg11_bn" else {}
    model = models.build(name, num_classes=5, image_size=size, **options)
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
        model = models.build("efficientnet_b0", num_classes=3, image_size=32)
        before = sum(isinstance(m, torch.nn.SiLU) for m in model.modules())
        operate(model)
        assert sum(isinstance(m, torch.nn.SiLU) for m in model.modules()) == before > 0
        assert not batch_norms(model)
        assert model(torch.randn(2, 3, 32, 32)).logits.shape == (2, 3)


@pytest.mark.usefixtures("timm_ready")
def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(FedkeelError, match="did you mean 'timm:efficientnet_b0'"):
        models.build("timm:eficientnet_b0", num_classes=3)
    with pytest.raises(FedkeelError, match="did you mean 'simple_cnn'"):
        models.build("simple_cn", num_classes=3)


def test_without_timm_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    monkeypatch.setattr(timm_models.importlib, "import_module", refuse)
    with pytest.raises(FedkeelError, match=r"not installed: pip install 'fedkeel\[timm\]'"):
        models.build("timm:resnet18", num_classes=3)


def test_a_broken_torchvision_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: str) -> ModuleType:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(timm_models.importlib, "import_module", fail)
    with pytest.raises(FedkeelError, match=r"cannot be imported \(operator torchvision::nms does not exist\)"):
        models.build("timm:resnet18", num_classes=3)


@pytest.mark.parametrize("name", ["resnet26d", "resnet50d", "vgg16", "convnext_tiny"])
@pytest.mark.parametrize("is_installed", [True, False])
def test_a_bare_name_that_may_be_timms_says_that_timm_cannot_be_imported(
    name: str, is_installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(asked: str) -> ModuleType:
        if is_installed:
            raise RuntimeError("operator torchvision::nms does not exist")
        raise ModuleNotFoundError(f"No module named '{asked}'", name=asked)

    monkeypatch.setattr(timm_models.importlib, "import_module", fail)
    with pytest.raises(FedkeelError) as error:
        models.build(name, num_classes=3)
    sentence = str(error.value)
    assert sentence.startswith(f"There is no model named '{name}' here, and timm, which may have it, ")
    reason = "cannot be imported (operator torchvision::nms" if is_installed else "is not installed: pip install"
    assert reason in sentence
    assert "did you mean" in sentence or "choose from" in sentence


def test_our_own_networks_never_import_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def watch(name: str, *args: object, **kwargs: object) -> object:
        assert not name.startswith("timm.")
        assert name != "timm"
        return original(name, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", watch)
    monkeypatch.setattr(timm_models.importlib, "import_module", lambda name: pytest.fail(f"imported {name}"))
    models.build("simple_cnn", num_classes=3)
