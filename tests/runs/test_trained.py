"""A trained model comes back: what it says of images is what its test said, wherever the run directory lies."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import fedkeel
from fedkeel import models
from fedkeel.cli import main
from fedkeel.data.federation import Federation
from fedkeel.errors import FedkeelError
from fedkeel.runs.run import Run
from fedkeel.runs.trained import Predictions

OPTIONS = {"rounds": 2, "subsample": 20, "batch_size": 10, "device": "cpu", "executor": "serial"}


class Own(nn.Module):
    """A network of somebody's own, with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8)
        self.classifier = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(F.relu(self.norm(self.convolution(x))).mean((2, 3)))  # type: ignore[no-any-return]


def own() -> nn.Module:
    return models.wrap(Own(), head="classifier", num_classes=10)


def pictures_of(federation: Federation, domain: str) -> tuple[list[np.ndarray], list[str]]:
    client = federation[domain]
    pictures = [federation.images[i].permute(1, 2, 0).numpy() for i in client.test.tolist()]
    return pictures, [federation.classes[federation.labels[i]] for i in client.test.tolist()]


@pytest.fixture(scope="module")
def digits() -> Federation:
    return fedkeel.data.load("digits-shift")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fedkeel.simulate(directory=tmp_path_factory.mktemp("runs") / "run", method="fedavg", **OPTIONS)


@pytest.mark.parametrize("method", ["fedavg", "hbn", "fedwon", "gn", "fedbn", "fedrdn", "fedsr", "standalone"])
@pytest.mark.slow
def test_it_says_what_the_test_said(method: str, digits: Federation, tmp_path: Path) -> None:
    run = fedkeel.simulate(directory=tmp_path / "run", method=method, **OPTIONS)
    pictures, truth = pictures_of(digits, "scan")
    personal = method in ("fedbn", "fedrdn", "standalone")
    said = run.predict(pictures, client="scan" if personal else None)
    assert np.mean([a == b for a, b in zip(said.classes, truth, strict=True)]) == pytest.approx(run.domains["scan"])
    assert said.probabilities.sum(1).numpy() == pytest.approx(1.0, abs=1e-5)
    if personal:
        for refuses in (run.predict, lambda _: run.model(), lambda _: fedkeel.load(run.directory)):
            with pytest.raises(FedkeelError, match="say whose with --client"):
                refuses(pictures)


def test_every_way_to_give_an_image_is_the_same(finished: Run, digits: Federation, tmp_path: Path) -> None:
    pictures, _ = pictures_of(digits, "scan")
    pictures = pictures[:3]
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for number, picture in enumerate(pictures):
        Image.fromarray(picture).save(tmp_path / "deep" / "er" / f"{number}.png")
    (tmp_path / "deep" / ".hidden.png").write_text("nobody's data")
    (tmp_path / "deep" / "notes.txt").write_text("no image")
    stacked = np.stack(pictures)
    ways = [
        *(pictures, stacked, torch.from_numpy(stacked).permute(0, 3, 1, 2), tmp_path / "deep", str(tmp_path)),
        *([Image.fromarray(picture) for picture in pictures], sorted((tmp_path / "deep" / "er").iterdir())),
    ]
    first = finished.predict(ways[0])
    for way in ways[1:]:
        assert torch.equal(finished.predict(way).probabilities, first.probabilities)
    one = finished.predict(pictures[1])
    assert torch.allclose(one.probabilities[0], first.probabilities[1], atol=1e-5)
    assert (one.images, first.images) == (["0"], ["0", "1", "2"])
    assert finished.predict(tmp_path / "deep").images == [str(tmp_path / "deep" / "er" / f"{n}.png") for n in range(3)]


def test_other_sizes_and_kinds_become_what_the_data_set_stores(finished: Run) -> None:
    trained = finished.trained()
    grey = Image.new("L", (50, 20), 128)
    assert trained.preprocess([grey, grey.convert("RGBA"), np.zeros((7, 9), np.uint8)]).shape == (3, *trained.shape)
    logits = trained.network(trained.preprocess(grey))
    assert logits.shape == (1, len(trained.labels))
    assert not trained.network.training


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("axes", ["NHW", "NCHW", "NHWC", "N4HW"])
def test_what_a_federation_is_made_of_can_be_predicted(axes: str, kind: Callable[..., Any], tmp_path: Path) -> None:
    shape = [{"N": 24, "C": 3, "H": 8, "W": 8, "4": 4}[axis] for axis in axes]
    given = kind(np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8))
    federation = fedkeel.data.federation(given, np.arange(24) % 2, clients=np.arange(24) // 12, name="own")
    run = fedkeel.simulate(federation=federation, directory=tmp_path / "run", rounds=1, executor="serial")
    trained = run.trained()
    expected = trained.network(trained.transform(federation.images[:3], torch.empty(1, 0))).softmax(1)
    torch.testing.assert_close(run.predict(given[:3]).probabilities, expected)
    torch.testing.assert_close(run.predict(given[0]).probabilities, expected[:1])


def test_files_are_read_as_for_training(finished: Run, tmp_path: Path) -> None:
    """TIFF of 16 bits, GIF and DICOM through the function that `folder` decodes with."""
    pydicom = pytest.importorskip("pydicom")
    grey = np.random.default_rng(0).integers(0, 256, (32, 32)).astype(np.uint8)
    Image.fromarray(grey).save(tmp_path / "a.gif")
    Image.fromarray(grey.astype(np.uint16) * 256 + 77).save(tmp_path / "b.tif")
    file = pydicom.Dataset()
    file.file_meta = pydicom.dataset.FileMetaDataset()
    file.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    file.file_meta.MediaStorageSOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    file.file_meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
    file.Rows = file.Columns = 32
    file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation, file.SamplesPerPixel = 8, 8, 7, 0, 1
    file.PhotometricInterpretation, file.PixelData = "MONOCHROME2", grey.tobytes()
    file.save_as(tmp_path / "IM0001", enforce_file_format=True)
    found = fedkeel.load(finished.directory).predict(tmp_path)
    assert [Path(name).name for name in found.images] == ["IM0001", "a.gif", "b.tif"]
    expected = fedkeel.load(finished.directory).predict(np.repeat(grey[..., None], 3, 2)).probabilities
    for row in found.probabilities:
        torch.testing.assert_close(row, expected[0])


def test_scans_of_twelve_bits_are_predicted_and_calibrated_as_they_were_trained(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random = np.random.default_rng(0)
    for label in ("ill", "well"):
        (tmp_path / "data" / "north" / label).mkdir(parents=True)
        for number in range(6):
            scan = random.integers(0, 4096, (8, 8)).astype(np.uint16)
            Image.fromarray(scan).save(tmp_path / "data" / "north" / label / f"{number}.tif")
    federation = fedkeel.data.load("folder", root=tmp_path / "data", size=8, bits=12)
    run = fedkeel.simulate(federation=federation, directory=tmp_path / "run", rounds=1, executor="serial")
    caplog.clear()
    trained = fedkeel.load(run.directory)  # of what is in the directory alone
    files = [tmp_path / "data" / path for path in federation.paths]
    expected = trained.transform(federation.images, torch.empty(1, 0))
    torch.testing.assert_close(trained.preprocess(files), expected)
    site = fedkeel.calibrate(run, tmp_path / "data", always=True)
    assert site.trained is not None
    torch.testing.assert_close(site.trained.preprocess(files), expected)
    site.save(tmp_path / "north.safetensors")
    known = json.loads((tmp_path / "north.safetensors.json").read_text())["preprocessing"]
    assert known["bits"] == 12
    assert not [message for message in caplog.messages if "dark" in message]
    Image.fromarray(np.full((8, 8), 5000, np.uint16)).save(tmp_path / "b.tif")
    with pytest.raises(FedkeelError, match="its pixels go from 5,000 to 5,000: 12 bits hold 0 to 4,095"):
        trained.predict(tmp_path / "b.tif")


def test_dark_scans_are_told_when_they_are_predicted(
    finished: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(3):
        Image.fromarray(np.full((32, 32), 4000, np.uint16)).save(tmp_path / f"{number}.png")
    finished.predict(tmp_path, tolerate=True)
    (told,) = caplog.messages
    assert told.startswith(
        f"3 of the 3 grey images of 16 bits use at most 12 of them, so that they come out dark ('{tmp_path}"
    )


@pytest.mark.parametrize(
    ("images", "told"),
    [
        ("nowhere", "does not exist"),
        ([], "no image"),
        (3, "give paths, PIL images, arrays"),
        (np.zeros((4, 4)), "give uint8"),
        (np.zeros(4, np.uint8), "give uint8"),
    ],
)
def test_what_is_no_image(images: object, told: str, finished: Run) -> None:
    with pytest.raises(FedkeelError, match=told):
        finished.predict(images)


def test_a_broken_file_is_named_or_left_out(finished: Run, tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:40])
    with pytest.raises(FedkeelError, match=r"The image '.*b\.png' cannot be read"):
        finished.predict(tmp_path)
    said = finished.predict(tmp_path, tolerate=True)
    assert (len(said), list(said.unreadable)) == (1, [str(tmp_path / "b.png")])
    (tmp_path / "a.png").unlink()
    with pytest.raises(FedkeelError, match="There is no image to look at"):
        finished.predict(tmp_path, tolerate=True)


class TestOwnObjects:
    @pytest.mark.parametrize("method", ["fedavg", "hbn", "fedwon", "gn(groups=2)"])
    def test_an_own_network_comes_back_here_and_in_another_process(
        self, method: str, digits: Federation, tmp_path: Path
    ) -> None:
        run = fedkeel.simulate(directory=tmp_path / "run", model=own(), method=method, **OPTIONS)
        pictures, truth = pictures_of(digits, "scan")
        here = run.predict(pictures)
        assert np.mean([a == b for a, b in zip(here.classes, truth, strict=True)]) == pytest.approx(run.domains["scan"])
        with pytest.raises(FedkeelError, match=r"The model of '.*' was given in Python: load it with fedkeel.load"):
            fedkeel.load(run.directory)
        there = fedkeel.load(run.directory, model=own()).predict(pictures)  # one that was never trained
        assert torch.equal(there.probabilities, here.probabilities)

    def test_another_network_is_refused(self, tmp_path: Path) -> None:
        run = fedkeel.simulate(directory=tmp_path / "run", model=own(), **OPTIONS)
        other = models.build("simple_cnn", num_classes=10, image_size=run.trained().shape[1:])
        with pytest.raises(FedkeelError, match="has not here, or in another size"):
            fedkeel.load(run.directory, model=other)
        with pytest.raises(FedkeelError, match="'model' is 'simple_cnn': give a network"):
            fedkeel.load(run.directory, model="simple_cnn")  # type: ignore[arg-type]

    def test_what_has_a_name_is_not_given(self, finished: Run) -> None:
        with pytest.raises(FedkeelError, match=r"The model of '.*' has a name, 'simple_cnn': leave it out"):
            fedkeel.load(finished.directory, model=own())

    @pytest.mark.slow
    def test_own_data_are_not_needed(self, digits: Federation, tmp_path: Path) -> None:
        run = fedkeel.simulate(directory=tmp_path / "run", federation=digits, **{**OPTIONS, "subsample": 0})
        pictures, _ = pictures_of(digits, "scan")
        assert len(fedkeel.load(run.directory).predict(pictures)) == len(pictures)


@pytest.mark.slow
def test_elsewhere_without_the_data(finished: Run, digits: Federation, tmp_path: Path) -> None:
    """Copied, in another process and another folder: the same numbers."""
    shutil.copytree(finished.directory, tmp_path / "copy")
    pictures, _ = pictures_of(digits, "paper")
    for number, picture in enumerate(pictures[:4]):
        (tmp_path / "new").mkdir(exist_ok=True)
        Image.fromarray(picture).save(tmp_path / "new" / f"{number}.png")
    command = [sys.executable, "-m", "fedkeel", "predict", "copy", "new", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    rows = json.loads(done.stdout)
    here = finished.predict(pictures[:4])
    assert [row["class"] for row in rows] == here.classes
    assert [row["probability"] for row in rows] == pytest.approx(here.confidence, abs=1e-5)


def test_no_name_in_a_table_is_a_formula(tmp_path: Path) -> None:
    found = Predictions(["=1+1.png"], torch.tensor([[0.25, 0.75]]), ["a", "@b"])
    assert found.to_csv(tmp_path / "p.csv").read_text().splitlines() == [
        "image,class,probability,p(a),p(@b)",
        "'=1+1.png,'@b,0.750000,0.250000,0.750000",
    ]


class TestCommand:
    def test_a_csv(self, finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
        out = tmp_path / "p.csv"
        assert main(["predict", str(finished.directory), str(tmp_path / "a.png"), "--out", str(out)]) == 0
        assert capsys.readouterr().out.strip() == str(out)
        (row,) = csv.DictReader(out.open())
        assert row["image"] == str(tmp_path / "a.png")
        assert float(row["probability"]) == pytest.approx(max(float(row[f"p({n})"]) for n in range(10)))

    def test_broken_files_are_told_and_the_others_classified(
        self, finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
        (tmp_path / "b.png").write_text("no image")
        assert main(["predict", str(finished.directory), str(tmp_path)]) == 1
        printed = capsys.readouterr()
        assert "a.png" in printed.out
        assert "b.png' cannot be read" in printed.err

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["nowhere", "a.png"], "nowhere"),
            (["RUN", "nowhere.png"], "does not exist"),
            (["RUN", ".", "--client", "nobody"], "one model for all clients"),
        ],
    )
    def test_what_cannot_be_meant(
        self, words: list[str], told: str, finished: Run, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["predict", *(str(finished.directory) if word == "RUN" else word for word in words)]) == 2
        assert told in capsys.readouterr().err
