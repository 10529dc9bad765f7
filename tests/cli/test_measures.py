"""Measures on the command line: `show --details`, `--metric`, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedkeel.cli import main
from tests import tiny


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measures")
    for method in ("fedavg", "fedbn"):
        tiny.run(folder / method, method, rounds=1, metrics="brier")
    return folder


def test_show_has_the_sites_with_intervals_and_what_to_know(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(runs / "fedavg")]) == 0
    shown = capsys.readouterr().out
    assert "balanced accuracy %" in shown
    assert "25.0 (7.1 to 59.1)" in shown
    assert "note    Too few test samples to tell much: 'bright', 'dark', 'tinted'" in shown
    assert "is taken for" not in shown


def test_details_have_the_classes_and_the_confusion_matrix(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(runs / "fedavg"), "--details"]) == 0
    shown = capsys.readouterr().out
    assert "is \\ is taken for" in shown
    assert all(name in shown for name in tiny.CLASSES)
    assert main(["show", str(runs / "fedavg"), "--json"]) == 0
    measures = json.loads(capsys.readouterr().out)["measures"]
    assert measures["accuracy"]["sites"]["bright"] == pytest.approx([0.25, 0.0715, 0.5907], abs=1e-4)
    assert len(measures["notes"]) >= 1


def test_a_table_is_of_the_metric_that_was_chosen_and_its_best_is_the_better_way(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(runs), "--metric", "brier", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["metric"] == "brier"
    values = {row["method"]: row["average"]["mean"] for row in document["rows"]}
    assert main(["show", str(runs), "--metric", "brier"]) == 0
    shown = capsys.readouterr().out
    assert "Test brier times 100, lower is better" in shown
    assert f"{100 * min(values.values()):.1f}" in shown
    assert main(["show", str(runs), "--metric", "balanced-accuracy"]) == 0
    assert "Test balanced accuracy in %, the last round" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["show", "RUN", "--metric", "acu"], "'acu' was not measured: did you mean 'auc'?"),
        (["show", "RUNS", "--metric", "top"], "'top' was not measured: choose from accuracy, auc,"),
        (["show", "RUNS", "--details"], "'--details' are of one run, and these are 2: give one of them"),
        (["compare", "fedavg", "--metric", "f11"], "There is no 'f11' to show: did you mean 'f1'?"),
        (["compare", "fedavg", "--metric", "brier"], "'brier' is not measured unless it is asked for: add --metrics"),
        (["report", "RUNS", "--metric", "top"], "'top' was not measured: choose from"),
        (["run", "--select-by", "lost"], "There is no metric named 'lost'"),
        (["run", "--select-by", "auc"], "'select_by' does nothing without --result best-validation"),
        (["run", "--min-delta", "0.1"], "'min_delta' does nothing without --patience"),
    ],
)
def test_what_was_not_measured_is_one_sentence(
    runs: Path, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    places = {"RUN": str(runs / "fedavg"), "RUNS": str(runs)}
    assert main([places.get(word, word) for word in words]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


def test_a_run_without_measures_is_shown_as_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny.run(tmp_path / "r", rounds=1)
    (run.directory / "measures.json").unlink()
    assert main(["show", str(run.directory), "--details"]) == 0
    assert "no measures by class" in capsys.readouterr().out
    assert main(["show", str(run.directory), "--metric", "f1"]) == 2
    assert "has no measures.json" in capsys.readouterr().err
