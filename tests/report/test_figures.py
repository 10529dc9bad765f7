"""Figures for a paper: one file each, in the format asked for, from names of any kind; and the page as a printout."""

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


@pytest.mark.slow
@needs_converter
def test_the_same_runs_give_the_same_svg_with_names_as_text(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedprox(note='<$x$>')", rounds=3, domains=("日本", "_b"))
    texts = []
    for place in ("one", "two"):
        report.write_figures(report.collect([tmp_path / "a"]), tmp_path / place, "svg")
        texts.append((tmp_path / place / "domains.svg").read_text())
    assert texts[0] == texts[1]
    assert "日本" in texts[0]
    assert "_b" in texts[0]
    assert "accuracy, %" in texts[0]


@needs_converter
def test_names_that_make_one_file_name_make_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkeel.report.paper.as_file", lambda *_: b"drawn")
    make_run(tmp_path / "a", rounds=2, domains=("a/b", "a b", "a?b"))
    written = report.write_figures(report.collect([tmp_path / "a"]), tmp_path / "f", "svg")
    assert len(written) == len(set(written))
    assert sum(path.stem.startswith("curve-domain-a-b") for path in written) == 3


@pytest.mark.parametrize(
    ("package", "option", "sentence"),
    [
        (
            "vl_convert",
            "--figures",
            "fedkeel: Figures need vl-convert-python, which is not installed: pip install 'fedkeel[report]'.\n",
        ),
        (
            "playwright",
            "--pdf",
            "fedkeel: A printout needs playwright, which is not installed: pip install playwright, then 'playwright "
            "install chromium'; or open the page and print it from your browser.\n",
        ),
    ],
)
def test_what_is_not_installed_is_one_sentence_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    package: str,
    option: str,
    sentence: str,
) -> None:
    make_run(tmp_path / "a")
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else real(name))
    assert main(["report", str(tmp_path / "a"), option, str(tmp_path / "f")]) == 2
    assert capsys.readouterr().err == sentence
    assert not (tmp_path / "a" / "report.html").exists()
    assert main(["report", str(tmp_path / "a")]) == 0, "the page needs nothing"
