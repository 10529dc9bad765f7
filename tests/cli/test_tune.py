"""`fedkeel tune`: what was chosen and the test results once, for a person or a script, and again without training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedkeel.cli import main

pytest.importorskip("optuna")
TINY = [
    "--subsample",
    "10",
    "--model",
    "simple_cnn(width=2)",
    "--executor",
    "serial",
    "--device",
    "cpu",
    "--rounds",
    "1",
]


@pytest.mark.slow
def test_it_prints_the_choices_and_the_table_and_its_folder_can_be_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "search")
    words = ["tune", "fedavg", "fedprox", "--space", "learning_rate=[0.01, 0.05]", "--space", "fedprox.mu=[0.1, 1]"]
    words += [*TINY, "--trials", "4", "--seeds", "2", "--jobs", "1", "--out", out]
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "Chosen on validation data." in shown
    assert "Test accuracy in %" in shown
    assert shown.count("Test accuracy") == 1
    assert main([*words, "--json", "--quiet"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {name: sorted(values) for name, values in document["best"].items()} == {
        "fedavg": ["learning_rate"],
        "fedprox": ["fedprox.mu", "learning_rate"],
    }
    assert [len(method["trials"]) for method in document["methods"]] == [2, 4]
    assert {run["seed"] for run in document["comparison"]["runs"]} == {1, 2}  # 0 was the search's
    assert main(["show", out, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [run["method"] for run in rows] == [run["method"] for run in document["comparison"]["runs"]]
    assert main(["report", out]) == 0


def test_options_of_a_file_count_but_for_what_a_search_sets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('method = "greg"\nseed = 4\nevaluate_on = "test"\nlearning_rate = 0.05\nweighting = "uniform"\n')
    words = ["tune", "fedavg", "--config", str(file), *TINY, "--trials", "1", "--seeds", "1", "--jobs", "1", "--json"]
    assert main([*words, "--quiet", "--out", str(tmp_path / "s")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["best"] == {"fedavg": {"learning_rate": 0.05}}
    assert document["methods"][0]["space"] == {"learning_rate": "log(0.005, 0.5)"}
