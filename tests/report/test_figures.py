"""Figures for a paper: one file each, in the format asked for, from names of any kind."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from fedkeel import report
from fedkeel.cli import main
from fedkeel.report import figures
from tests.report.samples import add_diagnostics, make_comparison, make_run

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)
STARTS = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}


@pytest.mark.slow
@needs_matplotlib
@pytest.mark.parametrize("format", ["svg", "png", "pdf"])
def test_every_figure_is_a_file_of_that_format(tmp_path: Path, format: str) -> None:
    make_comparison(tmp_path / "c", ("fedavg", "fedbn"), rounds=3, domains=("photo",))
    add_diagnostics(tmp_path / "c" / "row0" / "seed0")
    written = figures.write(report.collect([tmp_path / "c"]), tmp_path / "f", format)
    names = {path.stem for path in written}
    assert {"curve-average", "curve-domain-photo", "curve-test-loss", "curve-train-loss", "domains"} <= names
    assert {f"every-kind-fedavg-seed-0-{i}" for i in (1, 2, 3, 4)} <= names, "a table is no figure"
    assert all(path.read_bytes().startswith(STARTS[format]) for path in written)


@pytest.mark.slow
@needs_matplotlib
def test_the_same_runs_give_the_same_svg_with_names_as_text(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedprox(note='<$x$>')", rounds=3, domains=("日本", "b"))
    texts = []
    for place in ("one", "two"):
        figures.write(report.collect([tmp_path / "a"]), tmp_path / place, "svg")
        texts.append((tmp_path / place / "domains.svg").read_text())
    assert texts[0] == texts[1]
    assert "日本" in texts[0]


@needs_matplotlib
def test_names_that_make_one_file_name_make_two_files(tmp_path: Path) -> None:
    make_run(tmp_path / "a", rounds=2, domains=("a/b", "a b", "a?b"))
    written = figures.write(report.collect([tmp_path / "a"]), tmp_path / "f", "svg")
    assert len(written) == len(set(written))
    assert sum(path.stem.startswith("curve-domain-a-b") for path in written) == 3


@pytest.mark.slow
@needs_matplotlib
def test_letters_that_the_font_lacks_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "a", rounds=2, domains=("日本", "中国"))
    assert main(["report", str(tmp_path / "a"), "--figures", str(tmp_path / "f"), "--format", "png"]) == 0
    assert capsys.readouterr().err.count("show as boxes") == 1


def test_without_matplotlib_it_is_one_sentence_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "a")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else real(name))
    assert main(["report", str(tmp_path / "a"), "--figures", str(tmp_path / "f")]) == 2
    assert capsys.readouterr().err == (
        "fedkeel: Figures need matplotlib, which is not installed: pip install 'fedkeel[report]'.\n"
    )
    assert not (tmp_path / "a" / "report.html").exists()
    assert main(["report", str(tmp_path / "a")]) == 0, "the page needs nothing"
