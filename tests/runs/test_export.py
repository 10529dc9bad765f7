from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import fedkeel
from fedkeel.cli import main
from fedkeel.data.transforms import transforms_text
from fedkeel.errors import FedkeelError
from fedkeel.runs.export import FORMATS, export
from fedkeel.runs.run import Run
from tests import tiny

pytestmark = pytest.mark.slow  # its runs are trained first

SHORT: dict[str, Any] = {
    "rounds": 1,
    "subsample": 16,
    "batch_size": 8,
    "executor": "serial",
    "device": "cpu",
    "evaluation_batch": 512,
}
HAS_ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="onnx, onnxscript and onnxruntime are not installed")
EACH = [pytest.param(name, marks=needs_onnx if name == "onnx" else ()) for name in FORMATS]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    @cache
    def run(method: str) -> Run:
        directory = tmp_path_factory.mktemp("trained") / "run"
        return fedkeel.simulate(SHORT, directory=directory, method=method)

    return run


def outputs(path: Path, format: str, x: Tensor) -> Tensor:
    """What the file says of these images, read without Fedkeel."""
    if format == "pt2":
        return torch.export.load(path).module()(x)
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(["logits"], {"images": x.numpy()})[0])


def some_images(count: int) -> tuple[Tensor, Tensor]:
    """As stored, and as the network sees them."""
    federation = fedkeel.data.load("digits-shift")
    raw = federation.images[federation.clients[0].test[:count]]
    return raw, federation.test_transform(raw, torch.full((count, federation.test_transform.draws), 0.5))


def inside(path: Path, format: str) -> str:
    """What the file says of itself."""
    extra: dict[str, Any] = {"fedkeel.json": ""}
    if format == "onnx":
        onnx = pytest.importorskip("onnx")
        return next(entry.value for entry in onnx.load(path).metadata_props if entry.key == "fedkeel.json")
    with path.open("rb") as file:
        torch.export.load(file, extra_files=extra)
    found = extra["fedkeel.json"]
    return found.decode() if isinstance(found, bytes) else str(found)


METHODS = ("fedavg", "hbn", "fedwon", "gn", "greg", "greg(mode=mix-learned)", "fedfn", "fedfa", "moon")


@pytest.mark.slow
@pytest.mark.parametrize("format", EACH)
@pytest.mark.parametrize("method", METHODS)
def test_the_file_says_what_the_model_says_for_any_batch_size(
    trained: Callable[[str], Run], tmp_path: Path, method: str, format: str
) -> None:
    run = trained(method)
    path = export(run, tmp_path / "model.bin", format)
    model = run.model()
    for count in (1, 2, 7):
        _, x = some_images(count)
        with torch.no_grad():
            torch.testing.assert_close(outputs(path, format, x), model(x).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("format", EACH)
def test_the_transform_can_be_part_of_it(trained: Callable[[str], Run], tmp_path: Path, format: str) -> None:
    run = trained("fedavg")
    path = export(run, tmp_path / "model.bin", format, with_transform=True)
    raw, x = some_images(5)
    assert raw.dtype == torch.uint8
    with torch.no_grad():
        torch.testing.assert_close(outputs(path, format, raw), run.model()(x).logits, rtol=1e-4, atol=1e-4)
    card = json.loads((tmp_path / "model.bin.json").read_text())
    assert (card["input"]["dtype"], card["input"]["range"]) == ("uint8", [0, 255])
    assert card["preprocessing"] == {
        "mode": "RGB",
        "resize": {"height": raw.shape[2], "width": raw.shape[3], "interpolation": "bilinear"},
        "transform": transforms_text(fedkeel.data.load("digits-shift").test_transform),
        "transform_done_inside": True,
    }
    assert json.loads(inside(path, format)) == card


@pytest.mark.slow
@pytest.mark.parametrize("format", EACH)
@pytest.mark.parametrize("method", ["fedbn", "fedrdn"])
def test_a_client_with_layers_of_its_own_has_a_file_of_its_own(
    trained: Callable[[str], Run], tmp_path: Path, method: str, format: str
) -> None:
    run = trained(method)
    name = fedkeel.data.load("digits-shift").clients[1].name
    model = run.model(name)
    kept = safetensors.torch.load_file(run.directory / "personal" / f"{name}.safetensors")
    assert all(torch.equal(model.state_dict()[entry], tensor) for entry, tensor in kept.items())
    _, x = some_images(3)
    path = export(run, tmp_path / "model.bin", format, client=name)
    with torch.no_grad():
        torch.testing.assert_close(outputs(path, format, x), model.eval()(x).logits, rtol=1e-4, atol=1e-4)
    with pytest.raises(FedkeelError, match="keeps layers on its clients, so each has a model of its own"):
        export(run, tmp_path / "model.bin", format)
    with pytest.raises(FedkeelError, match="There is no model of a client 'nobody'"):
        export(run, tmp_path / "model.bin", format, client="nobody")


@pytest.mark.slow
def test_fedwon_leaves_as_plain_convolutions(trained: Callable[[str], Run], tmp_path: Path) -> None:
    path = export(trained("fedwon"), tmp_path / "model.pt2")
    names = dict(torch.export.load(path).named_parameters())
    assert names
    assert not [name for name in names if name.endswith("gain")]


@pytest.mark.slow
def test_in_onnx_the_axis_of_the_batch_is_called_so(trained: Callable[[str], Run], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    graph = onnx.load(export(trained("fedavg"), tmp_path / "m.onnx")).graph
    assert [value.type.tensor_type.shape.dim[0].dim_param for value in (*graph.input, *graph.output)] == ["batch"] * 2


def test_the_card_beside_it_says_what_goes_in_and_what_comes_out(
    trained: Callable[[str], Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("fedavg")
    assert main(["export", str(run.directory), "--out", str(tmp_path / "m.pt2"), "--with-transform"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "m.pt2")
    card = json.loads((tmp_path / "m.pt2.json").read_text())
    assert card["format"] == "pt2"
    assert card["classes"] == [str(digit) for digit in range(10)]
    assert card["input"]["shape"] == ["batch", *fedkeel.data.load("digits-shift").image_shape]
    assert card["output"]["shape"] == ["batch", 10]
    assert card["accuracy"] == run.accuracy


@pytest.mark.parametrize("rule", ["last", "mean-last-10"])
def test_the_card_of_a_client_s_file_has_that_client_s_accuracy(tmp_path: Path, rule: str) -> None:
    on = tiny.federation({"ward": 20, "clinic": 12, "annex": 9}, domains={"annex": "bright"})
    objects: dict[str, Any] = {"federation": on, "model": "simple_cnn(width=2)", "method": "fedbn"}
    run = fedkeel.simulate({**tiny.OPTIONS, "result": rule, "rounds": 3}, directory=tmp_path / "r", **objects)
    # Numbers that differ, whatever this machine's are; as in a directory without checksums.
    shares, records = {"ward": 0.1, "clinic": 0.2, "annex": 0.3}, run.records()
    for record in records:
        if record["kind"] == "evaluation":
            record["accuracy"] = shares[record["client"]] + 0.01 * record["round"] + 0.5 * (record["split"] != "test")
    (run.directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (run.directory / "checksums.json").unlink()
    shutil.rmtree(run.directory / "checkpoints")
    for client, share in shares.items():
        export(run, tmp_path / "m.pt2", client=client)
        card = json.loads((tmp_path / "m.pt2.json").read_text())
        assert card["accuracy"] == pytest.approx(share + (0.01 if rule == "mean-last-10" else 0.02))


def test_a_transform_that_is_not_known_is_not_made_up(tmp_path: Path) -> None:
    class Own:
        draws = 0

        def __call__(self, x: Tensor, u: Tensor) -> Tensor:
            return x.float() / 255

    on = replace(tiny.federation(), test_transform=Own())
    run = fedkeel.simulate(
        {**tiny.OPTIONS, "rounds": 1}, directory=tmp_path / "r", federation=on, model="simple_cnn(width=2)"
    )
    with pytest.raises(FedkeelError, match=r"is not known here.*: leave --with-transform out\.$"):
        export(run, tmp_path / "m.pt2", with_transform=True)
    assert export(run, tmp_path / "m.pt2").exists()


def test_what_cannot_be_exported_is_refused_in_one_sentence(trained: Callable[[str], Run], tmp_path: Path) -> None:
    run = trained("fedavg")
    with pytest.raises(FedkeelError, match="does not say which format"):
        export(run, tmp_path / "model.bin")
    with pytest.raises(FedkeelError, match="The format is 'onx': did you mean 'onnx'"):
        export(run, tmp_path / "model.bin", "onx")
    with pytest.raises(FedkeelError, match="its folder does not exist"):
        export(run, tmp_path / "no" / "model.pt2")
    with pytest.raises(FedkeelError, match="has one model for all clients: leave the client 'x' out"):
        export(run, tmp_path / "model.pt2", client="x")
    own = tiny.run(tmp_path / "r", rounds=1)
    with pytest.raises(FedkeelError, match="was given in Python"):
        export(own.directory, tmp_path / "model.pt2")
    assert export(own, tmp_path / "model.pt2").exists()  # it was made in this process


def test_without_onnx_one_sentence_says_what_to_install(
    trained: Callable[[str], Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(FedkeelError, match=r"needs onnx, which is not installed: 'pip install fedkeel\[export\]'"):
        export(trained("fedavg"), tmp_path / "model.onnx")
