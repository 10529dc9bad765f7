"""`fedkeel calibrate`: what it says, what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

import fedkeel
from fedkeel.cli import calibrate as command
from fedkeel.cli import main
from fedkeel.nn.calibration import PRIOR

OPTIONS = {"rounds": 1, "subsample": 20, "batch_size": 10, "device": "cpu", "executor": "serial"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, and a folder of images of a look that it has not seen."""
    folder = tmp_path_factory.mktemp("calibrate")
    fedkeel.simulate(OPTIONS, unseen="scan", directory=folder / "run")
    digits = fedkeel.data.load("digits-shift")
    (folder / "images").mkdir()
    for number, image in enumerate(digits.images[digits["scan"].test[:40]]):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / "images" / f"{number:02}.png")
    return folder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_says_how_far_the_site_is_before_it_writes(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["calibrate", str(place / "run"), "--images", str(place / "images")]
    assert main([*words, "--out", "north.safetensors"]) == 0
    site = fedkeel.calibrate(place / "run", place / "images")
    *sentences, file = capsys.readouterr().out.splitlines()
    assert " ".join(" ".join(sentences).split()) == " ".join(site.sentences())
    assert file == "north.safetensors"
    assert sorted(path.name for path in Path().iterdir()) == ["north.safetensors", "north.safetensors.json"]
    record = json.loads(Path("north.safetensors.json").read_text())["calibration"]
    assert record == json.loads(json.dumps(site.to_dict()))


def test_to_look_writes_nothing_and_json_is_one_document(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["calibrate", str(place / "run"), "--images", str(place / "images"), "--json"]
    assert main([*words, "--look"]) == 0
    looked = json.loads(capsys.readouterr().out)
    assert list(Path().iterdir()) == []
    assert looked.pop("file") is None
    assert looked["images"] == 40
    assert main([*words, "--prior", "40", "--always"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["file"], document["share"]) == ("run-site.safetensors", 0.5)
    assert document["distance"] == looked["distance"]
    assert Path(document["file"]).exists()
    assert PRIOR == command.PRIOR


def test_predictions_of_the_calibrated_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, images = str(place / "run"), str(place / "images")
    assert main(["calibrate", run, "--images", images, "--out", "a.safetensors"]) == 0
    assert main(["predict", run, images, "--calibrated", "a.safetensors", "--out", "after.csv"]) == 0
    site = fedkeel.calibrate(run, images)
    assert site.trained is not None
    site.trained.predict(images).to_csv("expected.csv")
    assert Path("after.csv").read_text() == Path("expected.csv").read_text()
    assert main(["predict", run, images, "--out", "before.csv"]) == 0
    assert Path("after.csv").read_text() != Path("before.csv").read_text()
    capsys.readouterr()
    assert main(["predict", run, images, "--calibrated", f"{run}/model.safetensors"]) == 2
    assert "give a file that 'fedkeel calibrate' wrote" in capsys.readouterr().err


def test_what_cannot_be_read_is_named_and_left_out(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.png").write_text("no image")
    words = ["calibrate", str(place / "run"), "--images", str(place / "images"), "broken.png", "--look", "--json"]
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["images"] == 40
    assert "'broken.png' cannot be read" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--images", "gone"], "'gone' does not exist"),
        (["--images", "empty"], "There is no image to calibrate with"),
        (["--images", "IMAGES", "--prior", "-1"], "'prior' is -1.0: give at least 0."),
        (["--images", "IMAGES", "--prior", "nan"], "'prior' is nan: give a finite number."),
        (["--images", "IMAGES", "--prior", "few"], "'prior' is 'few': give a number of images"),
        (["--images", "IMAGES", "--out", "a.bin"], "'a.bin' does not say what it is to be"),
        (["--images", "IMAGES", "--out", "no/a.onnx"], "its folder does not exist"),
        (["--images", "IMAGES", "--with-transform"], "tensors alone"),
        (["--images", "IMAGES", "--look", "--out", "a.onnx"], "'--look' writes none: keep one."),
        (["--images", "IMAGES", "--look", "--with-transform"], "'--look' writes none: keep one."),
        (["--images", "IMAGES", "--client", "street"], "one model for all clients"),
        ([], "lacks --images"),
    ],
)
def test_what_is_refused(words: list[str], sentence: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty").mkdir()
    assert main(["calibrate", str(place / "run"), *[str(place / "images") if w == "IMAGES" else w for w in words]]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
    assert [path.name for path in Path().iterdir()] == ["empty"]


def test_a_run_that_is_not_finished(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run/config.toml").write_text((place / "run/config.toml").read_text())
    assert main(["calibrate", "run", "--images", str(place / "images")]) == 2
    assert "'run' is not finished" in capsys.readouterr().err
