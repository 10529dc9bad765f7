"""The curve of calibration: what it measures of runs, and how it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedkeel import analysis
from fedkeel.errors import FedkeelError
from tests import tiny

LARGE = {"ward": 40, "clinic": 30, "hospital": 50}


def numbers(document: dict[str, Any]) -> dict[str, float]:
    return {name: value for figure in document["figures"] for name, value in figure.get("numbers", {}).items()}


def look(run: Any, on: Any, network: Any = None, **options: Any) -> dict[str, float]:
    return numbers(analysis.run("calibration", run, federation=on, model=network or tiny.model(), **options))


def test_it_says_what_an_evaluation_under_each_says(tmp_path: Path) -> None:
    """As the run's own tests, by the same images: with the rule, and by the prior alone."""
    on = tiny.federation(LARGE, unseen=40)
    rule, prior = (
        tiny.run(tmp_path / f"{always}", on=on, evaluate_with="all", site_images=16, site_always=always)
        for always in (False, True)
    )
    found = look(rule, on, images="16")
    as_it_is, site, alone = (
        {
            record["domain"]: 100 * record["accuracy"]
            for record in run.records("evaluation")
            if (record["round"], record["split"], record["statistics"]) == (2, "test", kind)
        }
        for run, kind in ((rule, "global"), (rule, "site"), (prior, "site"))
    )
    for way, tested in (("as it is", as_it_is), ("rule 16", site), ("prior 16", alone)):
        assert tested.keys() == {"bright", "dark", "tinted", "foreign"}
        for domain, accuracy in tested.items():
            assert found[f"{domain} {way}"] == pytest.approx(accuracy)
        trained = [accuracy for domain, accuracy in tested.items() if domain != "foreign"]
        assert found[way] == pytest.approx(sum(trained) / len(trained))


def test_what_was_recorded_with_options_is_drawn_without_them(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r", on=tiny.federation(LARGE), record="calibration(images='2,5')")
    document = analysis.run("calibration", run, federation=tiny.federation(LARGE), model=tiny.model())
    assert [series["x"] for series in document["figures"][0]["series"]] == [[0, 2, 5]] * 3


@pytest.mark.parametrize("method", ["silobn", "fedbn", "gn(groups=2)", "hbn", "central"])
def test_it_works_whatever_becomes_of_statistics(method: str, tmp_path: Path) -> None:
    on = tiny.federation(LARGE, unseen=12)
    run = tiny.run(tmp_path / "r", method, on=on, rounds=2, record="calibration(images='4,all')")
    found = numbers(analysis.run("calibration", run, federation=on, model=tiny.model()))
    assert found.keys() >= {"as it is", "rule 4", "rule all", "prior all", "own all"}
    if method.startswith("gn"):  # nothing to calibrate: the curve is flat
        assert len({found[f"{way} {step}"] for way in ("rule", "prior", "own") for step in ("4", "all")}) == 1


@pytest.mark.parametrize("images", ["", "many", "4,-1", "1.5"])
def test_numbers_of_images_that_are_none_are_refused(images: str) -> None:
    with pytest.raises(FedkeelError, match="give numbers of images, or 'all'"):
        analysis.build("calibration", images=images)
