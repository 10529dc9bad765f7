"""Files as others make them, from torchvision's and timm's own networks, into the models here."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import fedkeel
from fedkeel import models
from fedkeel.core.state import Tensors
from fedkeel.errors import FedkeelError
from fedkeel.models.checkpoint import Loaded, load_weights
from tests import tiny


def scrambled(network: nn.Module, seed: int = 0) -> nn.Module:
    """Nothing at its initial value, so that a tensor in the wrong place shows; statistics included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in network.state_dict().items():
            if name.endswith("running_var"):
                tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
            elif not tensor.is_floating_point():
                tensor.fill_(7)
            elif tensor.ndim < 2:
                tensor.add_(0.3 * torch.randn(tensor.shape, generator=generator))
    return network.eval()


def saved(tensors: Any, path: Path) -> Path:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file({name: t.contiguous() for name, t in tensors.items()}, path)
    else:
        torch.save(tensors, path)
    return path


def tiny_file(path: Path, classes: int = 4) -> tuple[Path, Tensors]:
    """The tiny network of the tests."""
    network = scrambled(tiny.model(classes=classes))
    return saved(network.state_dict(), path), network.state_dict()


def equal(model: nn.Module, wanted: Tensors, but: str = "none") -> bool:
    return all(torch.equal(t, wanted[name]) for name, t in model.state_dict().items() if not name.startswith(but))


# -- torchvision and timm ----------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.usefixtures("timm_ready")
def test_torchvisions_network_becomes_ours_but_for_the_classifier(tmp_path: Path) -> None:
    import torchvision

    network = scrambled(torchvision.models.resnet18(weights=None, num_classes=6))
    model = models.build("resnet18", num_classes=6, image_size=64)
    fresh = model.head.weight.detach().clone()
    report = load_weights(model, saved(network.state_dict(), tmp_path / "resnet18.pth"))
    assert (report.missing, len(report.unexpected), report.new_head) == ((), 2, True)
    assert equal(model.encoder, network.state_dict())
    assert torch.equal(model.head.weight, fresh)
    (last,) = {name.rpartition(".")[0] for name in report.unexpected}
    x = torch.rand(2, 3, 64, 64)
    with torch.no_grad():
        logits = network.get_submodule(last)(model.eval()(x).features)
        torch.testing.assert_close(logits, network(x), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("timm_ready")
@pytest.mark.parametrize("name", ["resnet18", "tf_efficientnet_lite0"])
def test_timms_network_becomes_ours_but_for_the_classifier(name: str, tmp_path: Path) -> None:
    import timm

    network = scrambled(timm.create_model(name, num_classes=6))
    model = models.build(f"timm:{name}", num_classes=6, image_size=64)
    report = load_weights(model, saved(network.state_dict(), tmp_path / "timm.safetensors"))
    assert (report.missing, report.new_head) == ((), True)
    assert equal(model.encoder.network, network.state_dict())


# -- files -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("prefix", ["", "module.", "module.model."])
def test_every_kind_of_file_and_prefix(suffix: str, prefix: str, tmp_path: Path) -> None:
    _, wanted = tiny_file(tmp_path / "plain.pth")
    tensors = torch.load(tmp_path / "plain.pth", weights_only=True)
    path = saved({prefix + name: t for name, t in tensors.items()}, tmp_path / f"x{suffix}")
    model = tiny.model(seed=1)
    report = load_weights(model, path)
    assert report == Loaded(str(path), len(wanted), False, (), ())
    assert equal(model, wanted)
    assert str(report) == f"{len(wanted)} tensors come from '{path}'."


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict"])
def test_tensors_are_found_inside_a_training_checkpoint(key: str, tmp_path: Path) -> None:
    _, wanted = tiny_file(tmp_path / "plain.pth")
    tensors = torch.load(tmp_path / "plain.pth", weights_only=True)
    content = {"epoch": 3, key: {f"module.{n}": t for n, t in tensors.items()}, "optimizer": {"state": {}}, "best": 0.5}
    model = tiny.model(seed=1)
    load_weights(model, saved(content, tmp_path / "checkpoint.pth"))
    assert equal(model, wanted)


def test_what_is_left_is_named(tmp_path: Path) -> None:
    path, wanted = tiny_file(tmp_path / "plain.pth", classes=9)
    tensors = torch.load(path, weights_only=True)
    del tensors["encoder.1.num_batches_tracked"]
    tensors |= {f"extra{i}.bias": torch.zeros(2) for i in range(5)}
    model = tiny.model(seed=1)
    report = load_weights(model, saved(tensors, tmp_path / "x.pth"))
    assert report.missing == ("encoder.1.num_batches_tracked",)
    assert report.unexpected == tuple(f"extra{i}.bias" for i in range(5))
    assert report.new_head
    assert str(report) == (
        f"6 tensors come from '{tmp_path / 'x.pth'}'; the classifier stays new; the file has none for "
        "'encoder.1.num_batches_tracked'; the model has no place for 'extra0.bias', 'extra1.bias', 'extra2.bias' "
        "and 2 more."
    )
    assert torch.equal(model.encoder[0].weight, wanted["encoder.0.weight"])


def test_the_result_of_a_run_starts_another(tmp_path: Path) -> None:
    first = tiny.run(tmp_path / "first", rounds=1)
    model = tiny.model(seed=5)
    report = load_weights(model, first.directory / "model.safetensors")
    assert (report.missing, report.unexpected, report.new_head) == ((), (), False)
    assert equal(model, safetensors.torch.load_file(first.directory / "model.safetensors"))


def test_the_body_alone_leaves_the_classifier_new(tmp_path: Path) -> None:
    network = scrambled(tiny.model())
    model = tiny.model(seed=1)
    report = load_weights(model, saved(network.encoder.state_dict(), tmp_path / "body.safetensors"))
    assert (report.missing, report.unexpected, report.new_head) == ((), (), True)
    assert equal(model.encoder, network.encoder.state_dict())


# -- refusals ----------------------------------------------------------------------------------------------------
class Code:
    def __reduce__(self) -> Any:
        return (print, ("run",))


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "is not a file"),
        (b"not a checkpoint", "cannot be read"),
        ({"w": Code()}, r"cannot be read \(it holds more than tensors\): give a file of tensors"),
        ([1, 2], "holds no named tensors"),
        ({"epoch": 3}, "holds no named tensors"),
        ({"layer9.conv.weight": torch.zeros(3)}, r"No name in .*'layer9.conv.weight'\) is of this model"),
        ({**tiny.model().state_dict(), "encoder.0.weight": torch.zeros(4, 1, 3, 3)}, r"has shape \(4, 1, 3, 3\) there"),
    ],
)
def test_a_file_that_cannot_be_used_changes_nothing(content: Any, sentence: str, tmp_path: Path) -> None:
    path, model = tmp_path / "x.pth", tiny.model(seed=1)
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        saved(content, path)
    with pytest.raises(FedkeelError, match=sentence):
        load_weights(model, path)
    assert equal(model, tiny.model(seed=1).state_dict())


# -- in a run ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedavg", "hbn", "fedbn", "greg", "gn", "fedwon(init=keep)"])
def test_a_run_starts_from_the_file_and_methods_take_the_weights_over(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, wanted = tiny_file(tmp_path / "plain.pth")
    with caplog.at_level(logging.INFO, "fedkeel"):
        worker = tiny.setup(method, network=tiny.model(seed=1), weights=str(path)).worker
    assert f"{len(wanted)} tensors come from '{path}'." in caplog.text
    for name, tensor in worker.model.state_dict().items():
        if name in wanted and wanted[name].shape == tensor.shape:
            torch.testing.assert_close(tensor, wanted[name], msg=name)
    first = worker.model.state_dict()["encoder.0.weight"]
    assert torch.equal(first.reshape(-1), wanted["encoder.0.weight"].reshape(-1))
    if method in ("fedavg", "hbn", "greg", "fedbn"):
        entries = worker.model.state_dict()
        assert torch.equal(entries["encoder.1.running_mean"], wanted["encoder.1.running_mean"])


def test_by_name_it_is_an_option_of_the_run_and_the_model_comes_back_without_the_file(tmp_path: Path) -> None:
    size = fedkeel.data.load("digits-shift").image_shape[1:]
    model = scrambled(models.build_spec("simple_cnn(width=2)", num_classes=10, image_size=size), seed=3)
    path = saved(model.state_dict(), tmp_path / "start.safetensors")
    options: dict[str, Any] = {**tiny.OPTIONS, "data": "digits-shift", "subsample": 12, "rounds": 1}
    options |= {"model": "simple_cnn(width=2)", "learning_rate": 1e-7}
    run = fedkeel.simulate(options, directory=tmp_path / "r", weights=str(path))
    assert run.config.weights == str(path)
    path.unlink()
    torch.testing.assert_close(run.model().head.weight, model.head.weight, rtol=1e-3, atol=1e-5)
    with pytest.raises(FedkeelError, match="is not a file"):
        fedkeel.simulate(options, directory=tmp_path / "again", weights=str(path))
    assert not (tmp_path / "again").exists()
