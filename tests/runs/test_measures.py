"""`measures.json`: what a run says of its model by site and class, and what it remarks upon."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedkeel.errors import FedkeelError
from fedkeel.formulas.measures import Measure, wilson
from fedkeel.runs.measures import Measures, interval
from fedkeel.runs.run import Run
from tests import tiny


def measured(confusions: dict[str, list[list[int]]], unseen: tuple[str, ...] = ()) -> Measures:
    """Of sites with these confusion matrices."""
    sites = [
        {"client": name, "domain": name, "confusion": cells(np.array(counts)), "measures": {"auc": [0.5, 0.4, 0.6]}}
        for name, counts in confusions.items()
    ]
    classes = ["cat", "dog", "owl"][: len(next(iter(confusions.values())))]
    document = {"classes": classes, "unseen": list(unseen), "lower_is_better": ["ece"], "sites": sites}
    return Measures.read(json.dumps(document).encode())


def cells(counts: np.ndarray) -> list[list[int]]:
    return [[int(i), int(j), int(counts[i, j])] for i, j in np.argwhere(counts)]


GOOD = [[90, 5, 5], [4, 90, 6], [3, 7, 90]]


def test_averages_are_over_the_trained_sites_and_unseen_ones_apart() -> None:
    found = measured({"north": GOOD, "south": (2 * np.array(GOOD)).tolist(), "far": [[1, 9, 0]] * 3}, ("far",))
    assert found.average("accuracy").value == pytest.approx(0.9)
    assert found.average("accuracy", unseen=True).value == pytest.approx(1 / 3)
    assert found.confusion().tolist() == (3 * np.array(GOOD)).tolist()
    assert found.confusion("south").tolist() == (2 * np.array(GOOD)).tolist()
    assert [one.value for one in found.by_class()["recall"]] == pytest.approx([0.9, 0.9, 0.9])
    one, both = found.of("accuracy")["north"], found.average("accuracy")
    assert both.high - both.low < one.high - one.low


def test_a_site_that_does_not_tell_a_measure_has_no_number_for_it() -> None:
    found = measured({"north": GOOD, "south": GOOD})
    found.sites[1].measures.pop("auc")
    assert np.isnan(found.of("auc")["south"].value)
    assert found.average("auc").value == 0.5
    assert found.to_dict()["auc"]["sites"]["south"] == [None, None, None]
    assert "auc" not in found.by_class()


def test_clients_that_share_their_test_images_know_no_more_than_one_of_them(tmp_path: Path) -> None:
    apart = tiny.federation({"ward": 8, "clinic": 8}, domains={"ward": "here", "clinic": "here"}, test=40)
    ward, clinic = apart.clients
    shared = replace(apart, clients=[ward, replace(clinic, test=ward.test)])
    one, two = (
        tiny.run(tmp_path / name, "fedbn", on=on, rounds=1).measures
        for name, on in {"apart": apart, "shared": shared}.items()
    )
    assert (one.samples("here"), two.samples("here")) == (80, 40)
    assert one.confusion().sum() == two.confusion().sum() == 80
    for found, share in ((one, 2**-0.5), (two, 1.0)):
        widths = [site.measures["accuracy"].high - site.measures["accuracy"].low for site in found.sites]
        mean = found.of("accuracy")["here"]
        assert mean.high - mean.low == pytest.approx(share * np.mean(widths), rel=0.05)
        recall = found.by_class()["recall"][0]
        assert recall.value == pytest.approx(
            np.mean([site.measures["recall"].classes[0].value for site in found.sites])
        )
        assert recall[:3] == pytest.approx(wilson(recall.value, found.samples("here") / 4).tolist())


def test_nothing_is_remarked_of_a_good_model_on_enough_images() -> None:
    assert measured({"north": GOOD, "south": GOOD}).notes() == []


def test_a_model_at_chance_level_is_remarked_upon() -> None:
    (note,) = measured({"north": [[30, 30, 40], [35, 30, 35], [30, 40, 30]]}).notes()
    assert note.startswith("The model is at chance level: its balanced accuracy over all sites is 30.0 (")
    assert note.endswith("guessing among 3 classes gives 33.3 %.")


def test_a_model_that_says_one_class_only_is_at_chance_level_whatever_its_accuracy() -> None:
    chance, never = measured({"north": [[95, 0], [5, 0]]}).notes()
    assert "balanced accuracy over all sites is 50.0" in chance
    assert never == "Never predicted at any site: 'dog' of 2 classes."


def test_a_class_that_is_predicted_at_another_site_is_not_lost() -> None:
    lost = [[90, 10, 0], [10, 90, 0], [60, 40, 0]]
    (note,) = measured({"north": lost}).notes()
    assert note == "Never predicted at any site: 'owl' of 3 classes."
    assert measured({"north": lost, "south": GOOD}).notes() == []


def test_a_test_set_that_is_too_small_to_tell_anything_is_remarked_upon() -> None:
    (note,) = measured({"north": GOOD, "lab": [[4, 1, 1], [0, 4, 1], [1, 1, 4]]}).notes()
    assert note.startswith("Too few test samples to tell much: 'lab' ('lab' has 17, and its accuracy is 70.6 (")


def test_the_end_of_a_run_tells_what_is_remarkable(tmp_path: Path) -> None:
    notes = tiny.Notes()
    run = tiny.run(tmp_path / "r", rounds=1, learning_rate=1e-9, observer=notes)
    assert notes.remarks == run.measures.notes()
    assert any("'bright', 'dark', 'tinted' ('bright' has 8" in remark for remark in notes.remarks)


def test_the_table_has_every_number_with_its_interval(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r", on=tiny.federation(unseen=12), rounds=1)
    table = run.frame("measures")
    assert list(table.columns) == ["client", "domain", "class", "measure", "value", "low", "high"]
    one = table[(table["domain"] == "dark") & (table["class"] == "bar") & (table["measure"] == "recall")]
    assert one["value"].item() == run.measure("recall")["dark"].classes[1].value
    assert set(table["domain"]) == {"bright", "dark", "tinted", "foreign"}
    assert list(run.confusion("dark").columns) == list(tiny.CLASSES)
    assert run.confusion().to_numpy().sum() == 24


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (lambda run: run.measure("auk"), "'auk' was not measured: did you mean 'auc'?"),
        (lambda run: run.measure("sens"), "'sens' was not measured: choose from accuracy, auc, balanced-accuracy,"),
        (lambda run: run.measure("brier"), "'brier' was not measured: choose from accuracy, auc, balanced-accuracy,"),
        (lambda run: run.confusion("dork"), "There is no site 'dork': did you mean 'dark'?"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(tmp_path: Path, ask: Any, sentence: str) -> None:
    run = tiny.run(tmp_path / "r", rounds=1)
    with pytest.raises(FedkeelError) as error:
        ask(run)
    assert sentence in str(error.value)


def test_a_run_of_an_earlier_version_has_none_and_says_so(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r", rounds=1)
    (run.directory / "measures.json").unlink()
    old = Run(run.directory)
    assert not old.has_measures
    with pytest.raises(FedkeelError, match=r"has no measures\.json, with measures beyond accuracy: it is not finished"):
        _ = old.measures


@pytest.mark.parametrize("text", ["{}", "[", '{"classes": ["a"], "unseen": [], "lower_is_better": [], "sites": [3]}'])
def test_a_file_that_somebody_has_been_at_is_refused(tmp_path: Path, text: str) -> None:
    run = tiny.run(tmp_path / "r", rounds=1)
    (run.directory / "measures.json").write_text(text)
    with pytest.raises(FedkeelError, match="was changed since the run wrote it"):
        _ = Run(run.directory).measures
    (run.directory / "checksums.json").unlink()
    with pytest.raises(FedkeelError, match="its tables cannot be read"):
        _ = Run(run.directory).measures


def test_numbers_for_a_table() -> None:
    assert interval(Measure(0.812, 0.75, 0.861)) == "81.2 (75.0 to 86.1)"
    assert interval(Measure(1.234, 1.0, 1.5), 1) == "1.23 (1 to 1.5)"
    assert interval(Measure(0.5, np.nan, np.nan)) == "50.0"
    assert interval(Measure(np.nan, np.nan, np.nan)) == "–"


@pytest.mark.parametrize(
    "ask", [lambda run: run.confusion(), lambda run: run.frame("measures"), lambda run: run.frame()]
)
def test_without_pandas_one_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Any
) -> None:
    run = tiny.run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(FedkeelError, match=r"A table needs pandas, .*fedkeel\[notebook\]"):
        ask(run)
