"""Models of float images and of vectors are used and exported like others."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import fedkeel
from fedkeel import data, report
from fedkeel.analysis import DIAGNOSTICS
from fedkeel.cli import main
from fedkeel.data.federation import Federation
from fedkeel.errors import FedkeelError
from fedkeel.runs.export import export
from fedkeel.runs.run import Run
from tests import vectors
from tests.runs.test_export import EACH, outputs

OPTIONS: dict[str, Any] = {"rounds": 1, "batch_size": 8, "device": "cpu", "executor": "serial"}
SCALED = "normalise(mean=[1,2,3,4,5,6], std=2)"
X = vectors.arrays()[0]


def float_images(count: int = 24) -> Federation:
    x = torch.randn(count, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    train = "crop(padding=1)+flip+rotation+normalise(mean=0, std=1)"
    return data.federation(x, np.arange(count) % 2, clients=np.arange(count) // 12, train_transform=train)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    federation = vectors.federation(train_transform=SCALED, test_transform=SCALED)
    directory = tmp_path_factory.mktemp("vectors") / "run"
    return fedkeel.simulate(OPTIONS, method="fedwon", model="mlp", federation=federation, directory=directory)


def test_arrays_tensors_tables_and_files_are_predicted_alike(run: Run, tmp_path: Path) -> None:
    trained = fedkeel.load(run.directory)
    expected = trained.network(torch.from_numpy((X - np.arange(1, 7)) / 2).float()).softmax(1)
    np.save(tmp_path / "new.npy", X)
    np.savetxt(tmp_path / "new.csv", X, delimiter=",", header="a,b,c,d,e,f", comments="")
    np.savetxt(tmp_path / "bare.csv", X, delimiter=",")
    for given in (
        X,
        torch.from_numpy(X),
        X.tolist(),
        tmp_path / "new.npy",
        str(tmp_path / "new.csv"),
        tmp_path / "bare.csv",
    ):
        torch.testing.assert_close(run.predict(given).probabilities, expected)
    assert len(run.predict([tmp_path / "new.npy", tmp_path / "new.csv"])) == 2 * len(X)
    assert run.predict(X[3]).images == ["0"]
    assert trained.preprocess(X).shape == (120, 6)


def test_the_command_line_reads_files_of_numbers(run: Run, tmp_path: Path) -> None:
    np.save(tmp_path / "new.npy", X)
    out = tmp_path / "predictions.csv"
    assert main(["predict", str(run.directory), str(tmp_path / "new.npy"), "--out", str(out)]) == 0
    rows = list(csv.DictReader(out.open()))
    assert [row["class"] for row in rows] == run.predict(X).classes


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (X[:, :5], r"The samples have the shape \(120, 5\): give \(N, 6\), as in training"),
        (np.zeros((2, 3, 8, 8)), "The samples have the shape"),
        ("missing.npy", r"'missing.npy' has no numbers \(no such file or directory\)"),
        ("pictures.png", r"has no numbers \(it is neither .csv nor .npy\)"),
        ([["a"] * 6], "What is given are no numbers"),
        (np.full((2, 6), np.nan), "The sample 0 has a value that is not a finite number"),
        ([], "There is no image|The samples have the shape"),
    ],
)
def test_what_is_no_sample_is_refused(run: Run, given: Any, sentence: str) -> None:
    with pytest.raises(FedkeelError, match=sentence) as caught:
        run.predict(given)
    assert "\n" not in str(caught.value)


def test_what_is_missing_can_be_tolerated(run: Run) -> None:
    x = X[:3].copy()
    x[1, 2] = np.nan
    predicted = run.predict(x, tolerate=True)
    assert (predicted.images, list(predicted.unreadable)) == (["0", "2"], ["1"])


def table(x: Any = X) -> pandas.DataFrame:
    return pandas.DataFrame(x, columns=list("abcdef"))


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trained on a table, so that its columns have names."""
    _, labels, sites = vectors.arrays()
    federation = data.federation(table().assign(sort=labels, site=sites), label="sort", clients="site")
    options = {**OPTIONS, "model": "mlp(hidden=4)", "predictions": True}
    return fedkeel.simulate(options, federation=federation, directory=tmp_path_factory.mktemp("named") / "run")


def test_columns_are_found_by_their_names(named: Run, tmp_path: Path) -> None:
    expected = named.predict(X).probabilities  # an array has no names: by position
    other = table()[list("fdbace")].assign(who='one, "two"')
    other.to_csv(tmp_path / "other.csv", index=False)
    other.to_csv(tmp_path / "semicolons.csv", index=False, sep=";")
    table().to_csv(tmp_path / "bare.csv", index=False, header=False)
    for given in (other, tmp_path / "other.csv", tmp_path / "semicolons.csv", tmp_path / "bare.csv"):
        torch.testing.assert_close(fedkeel.load(named.directory).predict(given).probabilities, expected)
    torch.testing.assert_close(named.predict(other.iloc[3]).probabilities, expected[3:4])  # a row of it


def test_columns_that_are_missing_or_empty_are_told(named: Run, tmp_path: Path) -> None:
    table().rename(columns={"c": "C"}).to_csv(tmp_path / "few.csv", index=False)
    with pytest.raises(FedkeelError, match=r"^'[^']*few.csv' lacks 'c': it must have every column that the model"):
        named.predict(tmp_path / "few.csv")
    with pytest.raises(FedkeelError, match=r"^The table lacks 'a', 'b': it must have every column"):
        named.predict(table()[list("fedc")])
    gap = table(X[:2]).astype(object)
    gap.loc[1, "b"] = ""
    gap.to_csv(tmp_path / "gap.csv", index=False)
    with pytest.raises(FedkeelError, match="The sample 1 has a value that is not a finite number"):
        named.predict(tmp_path / "gap.csv")
    with pytest.raises(FedkeelError, match="no numbers"):
        named.predict(gap.assign(b="much"))


def test_nothing_that_is_told_of_vectors_speaks_of_images(
    named: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table().to_csv(tmp_path / "new.csv", index=False)
    for words in (["show"], ["show", "--details"], ["predict"]):
        command, *flags = words
        files = [str(tmp_path / "new.csv")] if command == "predict" else []
        assert main([command, str(named.directory), *files, *flags]) == 0
        told = capsys.readouterr()
        assert "image" not in told.out + told.err
    assert (named.directory / "predictions/north.csv").read_text().startswith("row,label,")
    assert "images, " not in repr(named.predict(X))
    page = report.write([named.directory], tmp_path / "report.html").read_text()
    told, options = re.findall(r">([^<{}]*\bimages\b[^<{}]*)<", page.partition("</main>")[0]), "folder(root=./images"
    assert [text for text in told if options not in text] == []


@pytest.mark.slow
def test_a_fresh_process_needs_nothing_but_the_directory(run: Run) -> None:
    code = f"import fedkeel, numpy; print(fedkeel.load({str(run.directory)!r}).predict(numpy.ones((2, 6))).classes)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(run.predict(np.ones((2, 6))).classes)


@pytest.mark.slow
@pytest.mark.parametrize("format", EACH)
@pytest.mark.parametrize("inside", [False, True])
def test_an_exported_file_says_what_the_model_says(run: Run, tmp_path: Path, format: str, inside: bool) -> None:
    path = export(run, tmp_path / "model", format, with_transform=inside)
    x = torch.from_numpy(X)
    said = outputs(path, format, x if inside else (x - torch.arange(1, 7)) / 2).softmax(1)
    torch.testing.assert_close(said, run.predict(X).probabilities, rtol=1e-4, atol=1e-5)
    card = json.loads((tmp_path / "model.json").read_text())
    assert card["input"] == {"name": "images", "shape": ["batch", 6], "dtype": "float32", "range": None}
    assert card["preprocessing"]["resize"] is None
    assert card["preprocessing"]["transform_done_inside"] is inside


def test_float_images_train_with_transforms_of_place_and_come_back(tmp_path: Path) -> None:
    federation = float_images()
    for executor in ("serial", "processes"):
        run = fedkeel.simulate(
            {**OPTIONS, "executor": executor}, model="simple_cnn(width=2)", method="greg", federation=federation,
            directory=tmp_path / executor,
        )  # fmt: skip
    x = federation.images[federation["0"].test]
    predicted = fedkeel.load(run.directory).predict(x)
    torch.testing.assert_close(predicted.probabilities, run.model()(x).logits.softmax(1).detach())
    assert fedkeel.load(run.directory).predict(x[0]).probabilities.shape == (1, 2)
    with pytest.raises(FedkeelError, match=r"give \(N, 2, 9, 8\)"):
        run.predict(np.zeros((9, 8, 2), np.uint8))


@pytest.mark.slow
def test_diagnostics_and_the_report_take_vectors(tmp_path: Path) -> None:
    recorded = ",".join(set(DIAGNOSTICS.names()) - {"mixing-factors", "clipping"})  # of other methods
    options = {**OPTIONS, "rounds": 2, "model": "mlp(hidden=4)", "record": recorded, "method": "greg"}
    fedkeel.simulate(options, federation=vectors.federation(), directory=tmp_path / "run")
    assert main(["report", str(tmp_path / "run"), "--output", str(tmp_path / "report.html")]) == 0
    assert main(["show", str(tmp_path / "run")]) == 0
    assert "statistics-divergence" in (tmp_path / "report.html").read_text()
