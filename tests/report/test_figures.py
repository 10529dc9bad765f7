"""Figures for a paper: one file each, in the format asked for, from names of any kind."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fedkeel import report
from fedkeel.cli import main
from tests.report.samples import add_diagnostics, make_comparison, make_run

needs_converter = pytest.mark.skipif(
    importlib.util.find_spec("vl_convert") is None, reason="vl-convert-python is not installed"
)
STARTS = {"svg": b"<svg", "png": b"\x89PNG", "pdf": b"%PDF"}


@pytest.mark.slow
@needs_converter
@pytest.mark.parametrize("format", ["svg", "png", "pdf"])
def test_every_figure_is_a_file_of_that_format(tmp_path: Path, format: str) -> None:
    make_comparison(tmp_path / "c", ("fedavg", "fedbn"), rounds=3, domains=("photo",))
    add_diagnostics(tmp_path / "c" / "row0" / "seed0")
    written = report.write_figures(report.collect([tmp_path / "c"]), tmp_path / "f", format)
    names = {path.stem for path in written}
    assert {"curve-average", "curve-domain-photo", "curve-test-loss", "curve-train-loss", "domains"} <= names
    assert {f"every-kind-fedavg-seed-0-{i}" for i in (1, 2, 3, 4)} <= names, "a table is no figure"
    assert all(path.read_bytes().startswith(STARTS[format]) for path in written)


@needs_converter
def test_names_that_make_one_file_name_make_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeel.report.paper.as_file", lambda *_: b"drawn")
    make_run(tmp_path / "a", rounds=2, domains=("a/b", "a b", "a?b"))
    written = report.write_figures(report.collect([tmp_path / "a"]), tmp_path / "f", "svg")
    assert len(written) == len(set(written))
    assert sum(path.stem.startswith("curve-domain-a-b") for path in written) == 3


def test_without_the_converter_is_one_sentence_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "a")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vl_convert" else real(name))
    assert main(["report", str(tmp_path / "a"), "--figures", str(tmp_path / "f")]) == 2
    assert "pip install 'fedkeel[report]'" in capsys.readouterr().err
    assert not (tmp_path / "a" / "report.html").exists()
    assert main(["report", str(tmp_path / "a")]) == 0, "the page needs nothing"
