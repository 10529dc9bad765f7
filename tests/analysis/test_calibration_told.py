"""What a person reads of the diagnostic `calibration`; test_calibration.py has what it measures."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedkeel
from fedkeel.analysis.diagnostic import Measured
from fedkeel.cli import main


def test_many_images_are_counted_to_the_last_one() -> None:
    found = {"as it is": 0.5, "rule 4": 0.6, "prior 4": 0.6, "own 4": 0.6}
    site = {"images": 1234, "distance": 2108.4, "explained": 0.04321, "share": 0.9}
    values = {"domains": {"ward": found}, "average": found, "sites": {"ward": site}}
    *_, table = fedkeel.analysis.build("calibration(images='4')").figures([Measured(0, values)])
    assert table["rows"] == [["ward", "1234", "2108", "0.0432", "0.9"]]


def test_the_source_of_its_formula_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fedkeel.simulate(rounds=1, subsample=10, model="simple_cnn(width=2)", directory=tmp_path / "run", verbose=False)
    capsys.readouterr()
    assert main(["show", str(tmp_path / "run"), "--diagnostic", "calibration(images='4')"]) == 0
    title = "fedavg, seed 0: Accuracy after calibration to each site (class mix: Saerens et al., 2002)"
    assert capsys.readouterr().out.splitlines()[0] == title
