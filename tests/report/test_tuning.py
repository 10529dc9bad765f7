"""The section about a search: the trials of each method, from what the search wrote, whatever is in it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from fedkeel import report
from fedkeel.cli import main
from fedkeel.errors import FedkeelError
from fedkeel.report.tuning import search_figures
from tests.report.samples import make_comparison
from tests.report.test_page import ODD, figures_in, page_of

HEADING = "Tuning: how the settings were chosen"


def trial(number: int, state: str, score: float | None, rounds: int, **params: Any) -> dict[str, Any]:
    curve = [[round, (score or 0) * (round + 1) / rounds] for round in range(rounds)]
    return {"number": number, "state": state, "params": params, "score": score, "curve": curve, "directory": ""}


def method(name: str, **changes: Any) -> dict[str, Any]:
    trials = [
        trial(0, "finished", 0.5, 4, learning_rate=0.01, optimizer="sgd"),
        trial(1, "finished", 0.8, 4, learning_rate=0.3, optimizer="adamw"),
        trial(2, "pruned", 0.2, 2, learning_rate=0.001, optimizer="sgd"),
        trial(3, "failed", None, 0, learning_rate=0.2, optimizer="sgd") | {"problem": "its loss became nan"},
    ]
    space = {"learning_rate": "log(0.001, 0.3)", "optimizer": "['sgd', 'adamw']"}
    known = {"method": name, "space": space, "grid": False, "planned": 4, "best": 1, "trials": trials}
    known |= {"edges": {"learning_rate": "upper"}, "importance": {"learning_rate": 0.9, "optimizer": 0.1}}
    return {**known, **changes}


def make_search(folder: Path, *methods: dict[str, Any], select_by: str = "accuracy") -> Path:
    make_comparison(folder / "best", ("fedavg",))
    document = {"settings": {}, "trials": 4, "select_by": select_by, "methods": list(methods or [method("fedavg")])}
    (folder / "tuning.json").write_text(json.dumps(document))
    return folder


def test_the_trials_are_shown_by_round_and_by_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    page = page_of(make_search(tmp_path / "s"))
    assert HEADING in page
    assert "Of 4 trials, drawn (2 finished, 1 pruned, 1 failed), trial 1: learning_rate=0.3" in page
    assert "learning_rate is at the upper end of log(0.001, 0.3)." in page
    assert "its loss became nan" in page
    curves = next(figure for figure in figures_in(page, "lines") if figure.get("title") == "Trials by round")
    assert [(line["name"], line["x"]) for line in curves["data"]] == [
        ("trial 1, chosen", [1, 2, 3, 4]),
        ("trial 0", [1, 2, 3, 4]),
        ("trial 2, pruned", [1, 2]),
    ]
    (places,) = figures_in(page, "points")
    assert places["data"][0]["x"] == [0.01, 0.3, 0.001]
    assert places["data"][0]["y"] == [50, 80, 20]
    assert places["data"][0]["class"] == ["finished", "chosen", "pruned"]
    assert places["spec"]["encoding"]["x"]["scale"]["type"] == "log"
    bars = {figure["title"]: figure["data"][0] for figure in figures_in(page, "bars") if figure.get("title")}
    assert bars["The best accuracy by optimizer"]["value"] == [50, 80]
    assert any(data["value"] == [90, 10] for data in bars.values())


def test_it_is_there_for_the_comparison_alone_and_for_no_other(tmp_path: Path) -> None:
    folder = make_search(tmp_path / "s")
    assert HEADING in page_of(folder / "best")
    make_comparison(tmp_path / "plain", ("fedavg",))
    assert HEADING not in page_of(tmp_path / "plain")


def test_names_of_a_search_are_data(tmp_path: Path) -> None:
    page = page_of(make_search(tmp_path / "s", method(ODD), select_by='"><img src=x>'))
    assert "<script>alert(1)" not in page
    assert "<img src=x>" not in page


def test_a_loss_is_no_share(tmp_path: Path) -> None:
    page = page_of(make_search(tmp_path / "s", select_by="loss"))
    assert "loss 0.8." in page
    (places,) = figures_in(page, "points")
    assert places["data"][0]["y"] == [0.5, 0.8, 0.2]


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"settings": 1, "trials": 1, "select_by": "loss", "methods": [{}]}', "null"]
)
def test_a_damaged_search_costs_its_section_alone(text: str, tmp_path: Path) -> None:
    folder = make_search(tmp_path / "s")
    (folder / "tuning.json").write_text(text)
    page = page_of(folder)
    assert "Results" in page
    assert "tuning.json" in page
    assert "Trials by round" not in page


def test_one_that_is_not_finished_is_told_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_search(tmp_path / "s", method("fedavg", best=None, edges={}, importance={}))
    assert "None can be chosen yet." in page_of(folder)
    (folder / "best" / "comparison.json").unlink()
    assert main(["report", str(folder)]) == 2
    assert "is not finished: go on with it, by the same command as before." in capsys.readouterr().err


def test_the_figures_have_files_of_their_own(tmp_path: Path) -> None:
    (group,) = report.collect([make_search(tmp_path / "s")]).groups
    names = ["curves", "learning_rate", "optimizer", "importance"]
    assert [name for name, _ in search_figures(group)] == [f"tuning-fedavg-{name}" for name in names]
    (tmp_path / "s" / "tuning.json").write_text("{}")
    with pytest.raises(FedkeelError, match=r"tuning\.json"):
        list(search_figures(group))
