"""A folder holds one thing: what is begun in the folder of another would hide it, or be hidden."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fedkeel
from fedkeel.errors import FedkeelError
from fedkeel.experiments.reproduce import reproduce
from fedkeel.runs.intact import refuse_to_hide
from tests import tiny


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    objects: dict[str, Any] = {"federation": tiny.federation(), "model": tiny.model()}
    place = tmp_path_factory.mktemp("places") / "comparison"
    fedkeel.compare(["fedavg"], seeds=1, rounds=1, directory=place, **objects)
    return place


def test_a_run_does_not_begin_in_a_folder_of_others(comparison: Path) -> None:
    before = sorted(comparison.rglob("*"))
    with pytest.raises(FedkeelError, match="holds a comparison, and one would hide the other: choose"):
        tiny.run(comparison)
    for folder in (comparison.parent, comparison / "fedavg"):
        with pytest.raises(FedkeelError, match="holds other runs"):
            tiny.run(folder)
    assert sorted(comparison.rglob("*")) == before


def test_a_comparison_does_not_begin_above_other_runs(tmp_path: Path) -> None:
    tiny.run(tmp_path / "mine", rounds=1)
    with pytest.raises(FedkeelError, match="holds other runs, and one would hide the other"):
        fedkeel.compare(["fedavg"], directory=tmp_path)


def test_and_nothing_else_begins_in_that_of_a_run(tmp_path: Path) -> None:
    tiny.run(tmp_path, rounds=1)
    with pytest.raises(FedkeelError, match="holds a run, and one would hide the other"):
        fedkeel.compare(["fedavg"], directory=tmp_path)
    with pytest.raises(FedkeelError, match="holds a run, and one would hide the other"):
        reproduce("hbn/table1", directory=tmp_path)
    with pytest.raises(FedkeelError, match=r"already holds a run.*fedkeel resume"):
        tiny.run(tmp_path)


def test_searches_stay_by_themselves(tmp_path: Path) -> None:
    (tmp_path / "tuning.json").touch()
    for own in ("config.toml", "comparison.json", ""):
        with pytest.raises(FedkeelError, match="holds a search"):
            refuse_to_hide(tmp_path, own)
    refuse_to_hide(tmp_path, "tuning.json")
    refuse_to_hide(tmp_path / "fresh")
