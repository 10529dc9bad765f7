"""`fedkeel show --diagnostic` and `fedkeel list diagnostics`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fedkeel.analysis.diagnostic import DIAGNOSTICS
from fedkeel.cli import main

pytestmark = pytest.mark.slow  # its runs are trained first

SMALL = ["--rounds", "2", "--subsample", "20", "--executor", "serial", "--device", "cpu", "--quiet"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "recorded"
    assert (
        main(["run", *SMALL, "--out", str(directory), "--record", "loss-gap,gradient-norms", "--record-every", "1"])
        == 0
    )
    return directory


@pytest.mark.slow
def test_a_table_is_printed_and_the_file_is_written(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run), "--diagnostic", "label-distribution"]) == 0
    out = capsys.readouterr().out
    path = run / "diagnostics" / "label-distribution.json"
    assert f"written {path}" in out
    assert "HBN, Figure 3" in out
    for row in json.loads(path.read_text())["figures"][0]["rows"]:
        assert any(line.strip().startswith(row) for line in out.splitlines())


@pytest.mark.slow
def test_what_was_recorded_is_shown_and_kept(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "diagnostics" / "loss-gap.json").read_bytes()
    assert main(["show", str(run), "--diagnostic", "loss-gap", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [entry["round"] for entry in document["rounds"]] == [0, 1]
    assert (run / "diagnostics" / "loss-gap.json").read_bytes() == before


def test_a_run_that_cannot_be_written_to_is_looked_at_elsewhere(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file in the folder's place refuses root too."""
    shut = tmp_path / "shut"
    shutil.copytree(run, shut, ignore=shutil.ignore_patterns("diagnostics"))
    (shut / "diagnostics").write_text("")
    assert main(["show", str(shut), "--diagnostic", "label-distribution"]) == 2
    sentence = capsys.readouterr().err
    assert "cannot be written" in sentence
    assert sentence.endswith("choose another directory with --out.\n")
    assert main(["show", str(shut), "--diagnostic", "label-distribution", "--out", str(tmp_path / "elsewhere")]) == 0
    written = tmp_path / "elsewhere" / "diagnostics" / "label-distribution.json"
    assert f"written {written}" in capsys.readouterr().out
    assert json.loads(written.read_text())["name"] == "label-distribution"
    assert (
        main(["show", str(run), str(run), "--diagnostic", "label-distribution", "--out", str(tmp_path / "elsewhere")])
        == 2
    )
    assert "takes one run" in capsys.readouterr().err


def test_several_runs_at_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(run), str(run), "--diagnostic", "label-distribution", "--json"]) == 0
    assert [entry["directory"] for entry in json.loads(capsys.readouterr().out)] == [str(run)] * 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["tsnee", "."], "There is no diagnostic named 'tsnee': did you mean 'tsne'?"),
        (["label-distribution", "nowhere"], "'nowhere' is not a run directory"),
        (["tsne(samples=1)", "."], "The 'samples' of tsne"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", arguments[1], "--diagnostic", arguments[0]]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1


def test_the_list_has_every_one_with_its_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "diagnostics", "--json"]) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert sorted(entries) == DIAGNOSTICS.names()
    assert entries["tsne"]["options"]["samples"] == 1000
    assert all(entry["summary"] and entry["paper"] for entry in entries.values())
    assert main(["list", "diagnostics"]) == 0
    line = next(x for x in capsys.readouterr().out.splitlines() if x.strip().startswith("gradient-norms"))
    assert "FedCoda, Figure 4" in line
