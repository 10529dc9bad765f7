"""Tables by site, by class and of confusions, and the part of a page that has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedkeel import report
from fedkeel.errors import FedkeelError
from fedkeel.report.measures import class_table, confusion_table, site_table
from fedkeel.runs.measures import Measures
from tests import tiny
from tests.runs.test_measures import GOOD, measured


def test_a_site_has_its_metric_with_an_interval_and_the_usual_others() -> None:
    headings, rows, caption = site_table(measured({"north": GOOD, "far": GOOD}, ("far",)), "auc")
    assert headings == ["site", "samples", "AUC %", "balanced accuracy %", "F1 %"]
    assert rows[0] == ["north", "300", "50.0 (40.0 to 60.0)", "90.0", "90.0"]
    assert rows[1][0] == "far (unseen)"
    assert rows[2][:2] == ["average", "300"]
    assert "95 % interval" in caption


def test_every_class_has_a_row_and_one_that_is_not_there_a_dash() -> None:
    headings, rows, _ = class_table(measured({"north": [[9, 1, 0], [1, 9, 0], [0, 0, 0]]}))
    assert headings == ["class", "samples", "predicted", "recall %", "precision %", "F1 %"]
    assert rows[0][:3] == ["cat", "10", "10"]
    assert rows[2] == ["owl", "0", "0", "–", "–", "–"]


def test_the_confusion_matrix_is_whole_or_the_worst_of_many_classes() -> None:
    headings, rows, _ = confusion_table(measured({"north": GOOD}))
    assert headings[1:] == ["cat", "dog", "owl"]
    assert rows[1] == ["dog", "4", "90", "6"]
    names = tuple(f"c{number}" for number in range(13))
    site = measured({"north": GOOD}).sites[0]
    wide = site.confusion.copy()
    wide.resize((13, 13), refcheck=False)
    wide[:] = 0
    wide[2, 5], wide[0, 0] = 7, 3
    many = Measures(names, frozenset(), frozenset(), (site._replace(confusion=wide),))
    assert confusion_table(many)[1] == [["c2", "c5", "7", "7"]]


def test_a_page_has_the_tables_and_the_remarks_and_a_chosen_metric(tmp_path: Path) -> None:
    for seed in range(2):
        tiny.run(tmp_path / f"runs/{seed}", seed=seed, rounds=1)
    page = report.write([tmp_path / "runs"], tmp_path / "page.html").read_text()
    assert "By class and site" in page
    assert "All trained sites" in page
    assert "Too few test samples to tell much" in page
    other = report.write([tmp_path / "runs"], tmp_path / "other.html", metric="balanced-accuracy").read_text()
    assert "Test accuracy in %" in page
    assert "Test balanced accuracy in %" in other
    with pytest.raises(FedkeelError, match="'brier' was not measured"):
        report.write([tmp_path / "runs"], tmp_path / "none.html", metric="brier")
    assert not (tmp_path / "none.html").exists()


def test_damaged_measures_cost_no_page(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r", rounds=1)
    (run.directory / "measures.json").write_text("{}")
    page = report.write([run.directory]).read_text()
    assert "measures.json" in page
    assert "By class and site" not in page
