"""What goes into a paper: figures that are cropped and bring their fonts, in a document that LaTeX sets."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fedkeel.report.collect import Collected, collect
from fedkeel.report.paper import write_figures, write_tables
from tests.report.samples import make_comparison

pytest.importorskip("vl_convert")
METHODS = ("fedavg", "fedprox(mu=0.1)", "a_b & 50% #1 {x} $y$ ~^\\ café")


@pytest.fixture(scope="module")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Collected:
    directory = tmp_path_factory.mktemp("paper") / "runs"
    make_comparison(directory, METHODS, seeds=2)
    return collect([directory])


@pytest.mark.slow
def test_a_figure_is_one_page_of_its_size_with_its_fonts(collected: Collected, tmp_path: Path) -> None:
    drawn = write_figures(collected, tmp_path, "svg")
    for svg, path in zip(drawn, write_figures(collected, tmp_path, "pdf"), strict=True):
        pdf = path.read_bytes()
        assert re.findall(rb"/Type\s*/Pages\s*/Count (\d+)", pdf) == [b"1"]
        (box,) = re.findall(rb"/MediaBox \[([^]]*)\]", pdf)
        size = re.search(r'width="([\d.]+)" height="([\d.]+)"', svg.read_text())
        assert size is not None
        assert list(map(float, box.split())) == [0, 0, *map(float, size.groups())]
        used = set(re.findall(rb"/FontDescriptor (\d+) 0 R", pdf))
        assert len(re.findall(rb"/FontFile\d? \d+ 0 R", pdf)) == len(used) > 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs LaTeX")
def test_a_document_of_tables_and_figures_is_set_without_an_error(collected: Collected, tmp_path: Path) -> None:
    write_tables(collected, tmp_path)
    figures = [path.stem for path in write_figures(collected, tmp_path, "pdf")]
    included = "\n".join(rf"\clearpage \includegraphics[width=\linewidth]{{{name}}}" for name in figures)
    packages = r"\pdfminorversion=7 \usepackage{booktabs} \usepackage{graphicx}"
    (tmp_path / "paper.tex").write_text(
        rf"\documentclass{{article}} {packages} \begin{{document}} \input{{table}} {included} \end{{document}}"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout
    assert "pdfTeX warning" not in done.stdout
    assert "Missing character" not in (tmp_path / "paper.log").read_text(errors="replace")


def test_without_its_mark_a_test_has_no_browser() -> None:
    with pytest.raises(ImportError):
        import playwright.sync_api  # noqa: F401
