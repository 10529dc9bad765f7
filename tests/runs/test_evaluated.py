"""A model is tested on new labelled images, whatever they lie in: the same images give the same measures."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import fedkeel
from fedkeel.cli import main
from fedkeel.errors import FedkeelError
from fedkeel.runs.measures import Measures
from fedkeel.runs.run import Run

OPTIONS = {"rounds": 2, "subsample": 20, "batch_size": 10, "device": "cpu", "executor": "serial"}
DOMAINS = ("scan", "paper")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fedkeel.simulate(directory=tmp_path_factory.mktemp("runs") / "run", **OPTIONS)


@pytest.fixture(scope="module")
def images() -> list[tuple[str, str, np.ndarray]]:
    """Site, class and pixels."""
    federation = fedkeel.data.load("digits-shift")
    return [
        (name, federation.classes[federation.labels[i]], federation.images[i].permute(1, 2, 0).numpy())
        for name in DOMAINS
        for i in federation[name].test.tolist()
    ]


def as_folder(images: list[Any], root: Path) -> Path:
    for number, (site, label, pixels) in enumerate(images):
        (root / site / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(root / site / label / f"{number:05d}.png")
    return root


def as_table(images: list[Any], root: Path) -> Path:
    as_folder(images, root)
    rows = [(f"{s}/{label}/{number:05d}.png", label, s) for number, (s, label, _) in enumerate(images)]
    with (root / "list.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "site"), *rows])
    return root / "list.csv"


def as_npz(images: list[Any], root: Path) -> Path:
    arrays: dict[str, Any] = {"classes": [str(digit) for digit in range(10)]}
    for site in DOMAINS:
        arrays[f"x_{site}"] = np.stack([pixels for s, _, pixels in images if s == site])
        arrays[f"y_{site}"] = np.array([int(label) for s, label, _ in images if s == site])
    np.savez(root / "pack.npz", **arrays)
    return root / "pack.npz"


def known(measures: Measures, name: str = "accuracy") -> dict[str, Any]:
    return {site: measures.of(name)[site][:3] for site in DOMAINS}


def test_of_the_images_of_its_own_test_it_says_what_that_said(run: Run) -> None:
    for data in ("digits-shift", fedkeel.data.load("digits-shift")):
        found = run.evaluate(data)
        assert (found.confusion() == run.measures.confusion()).all()
        for name in ("accuracy", "auc", "ece", "loss"):
            assert np.allclose([*known(found, name).values()], [*known(run.measures, name).values()], atol=1e-5)


@pytest.mark.parametrize("store", [as_folder, as_table, as_npz])
def test_the_same_images_in_files_have_the_same_measures(
    store: Callable[[list[Any], Path], Path], run: Run, images: list[Any], tmp_path: Path
) -> None:
    found = run.evaluate(store(images, tmp_path))
    assert list(found.domains) == sorted(DOMAINS) or list(found.domains) == list(DOMAINS)
    assert known(found) == known(run.measures)


def test_the_same_images_in_python_have_the_same_measures(run: Run, images: list[Any]) -> None:
    sites, labels, pixels = map(list, zip(*images, strict=True))
    for given in (labels, np.array(labels, int)):
        assert known(run.evaluate(np.stack(pixels), given, sites=sites)) == known(run.measures)
    pairs = [(Image.fromarray(p), int(label)) for p, label in zip(pixels, labels, strict=True)]
    right = sum(known(run.measures)[site][0] * sites.count(site) for site in DOMAINS)
    assert run.evaluate(pairs).average("accuracy").value == pytest.approx(right / len(pairs))


def test_a_folder_of_classes_is_one_site(run: Run, images: list[Any], tmp_path: Path) -> None:
    as_folder([entry for entry in images if entry[0] == "scan"], tmp_path)
    assert run.evaluate(tmp_path / "scan").of("f1")["scan"] == run.measures.of("f1")["scan"]


def test_a_table_of_numbers_has_its_label_where_the_run_had_it(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(90, 3)), rng.integers(0, 2, 90)
    x[:, 0] += 4 * y
    rows = [
        [*map(str, row), "sick" if label else "well", site] for row, label, site in zip(x, y, "abc" * 30, strict=True)
    ]
    for name in ("train", "new"):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("p", "q", "r", "diagnosis", "ward"), *rows])
    data = f"table(file={tmp_path / 'train.csv'}, label=diagnosis, site=ward)"
    run = fedkeel.simulate(
        directory=tmp_path / "run", data=data, model="mlp", **{**OPTIONS, "subsample": 0, "rounds": 5}
    )
    found = run.evaluate(tmp_path / "new.csv")
    assert list(found.domains) == ["a", "b", "c"]
    assert found.confusion().sum() == 90
    assert found.average("accuracy").value > 0.8


def test_a_calibrated_model_is_tested_as_it_is(run: Run, images: list[Any], tmp_path: Path) -> None:
    scans = [entry for entry in images if entry[0] == "scan"]
    sites, labels, pixels = map(list, zip(*scans, strict=True))
    file = fedkeel.calibrate(run, np.stack(pixels), always=True).save(tmp_path / "scan.safetensors")
    found = run.evaluate(np.stack(pixels), labels, sites=sites, calibrated=file)
    said = fedkeel.load(run.directory, calibrated=file).predict(np.stack(pixels)).classes
    assert found.of("accuracy")["scan"].value == np.mean([a == b for a, b in zip(said, labels, strict=True)])
    assert found.of("loss") != run.measures.of("loss")


def test_the_command_shows_sites_and_classes_or_one_document(
    run: Run, images: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_folder(images, tmp_path)
    assert main(["evaluate", str(run.directory), str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("By site", "By class, over all sites", "is taken for", "note"))
    assert main(["evaluate", str(run.directory), str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["accuracy"]["sites"]["scan"] == pytest.approx(run.measures.of("accuracy")["scan"][:3])
    assert set(document["recall"]["classes"]) == {str(digit) for digit in range(10)}


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("nowhere", "'nowhere' is neither a file or folder that is there nor a data set"),
        ("empty", "There is no image of a class in 'empty': images are found in DIR/CLASS"),
        ("flat", "'flat' has images right in it: put them into folders of their classes"),
        ("strange", "There are images of the class 'eleven', which the model has not: its 10 classes are 0, 1, 2"),
        ("broken", "The image 'broken/site/3/a.png' cannot be read"),
        ("short.csv", "'short.csv' has the columns path, and lacks 'label'"),
        ("norows.csv", "'norows.csv' has no rows"),
        ("nopath.csv", "'nopath.csv' lacks the column 'path'"),
        ("lost.csv", "'gone.png' does not exist: give an image"),
        ("digits-shift(size=3)", "has no option 'size'"),
    ],
)
def test_what_cannot_be_tested_on_is_told_in_a_sentence(
    data: str,
    sentence: str,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    pixels = np.zeros((8, 8, 3), np.uint8)
    (tmp_path / "empty").mkdir()
    for place in ("flat", "strange/site/eleven", "broken/site/3"):
        Path(place).mkdir(parents=True)
        Image.fromarray(pixels).save(f"{place}/a.png")
    Path("broken/site/3/a.png").write_bytes(b"no image")
    tables = {
        "short": "path\na.png",
        "norows": "path,label",
        "nopath": "file,label\na.png,3",
        "lost": "path,label\ngone.png,3",
    }
    for name, text in tables.items():
        Path(f"{name}.csv").write_text(text + "\n")
    assert main(["evaluate", str(run.directory), data]) == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((np.zeros((2, 8, 8), np.uint8), [0]), "There are 2 images, 1 labels and 1 sites: give one for each image"),
        ((np.zeros((2, 8, 8), np.uint8), [0, 10]), "There are images of the class '10', which the model has not"),
        ((np.zeros((2, 8, 8), np.uint8), [0, 0.5]), "There are images of the class '0.5', which the model has not"),
        ((np.zeros((2, 8, 8), np.uint8),), "The data are a ndarray and say no classes"),
        ((7,), "The data are 7 and say no classes"),
        (("digits-shift", [0]), "These data say themselves which class each image is of"),
    ],
)
def test_what_is_given_in_python_is_refused_so_too(given: tuple[Any, ...], sentence: str, run: Run) -> None:
    with pytest.raises(FedkeelError, match=sentence):
        run.evaluate(*given)
