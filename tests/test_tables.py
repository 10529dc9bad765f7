"""Tables for papers: LaTeX with booktabs, the best in bold, the spread beside it, and any name printed as it is."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fedkeel.tables import Results, latex_text


def results(*names: str) -> Results:
    """Method i has 50 + 10 i percent with the first seed and two points more with the second."""

    def summary(number: int, seed: int) -> dict[str, object]:
        value = 0.5 + 0.1 * number + 0.02 * seed
        return {"domains": {"photo_1": value, "s&p": value - 0.1}, "accuracy": value - 0.05, "result": "last"}

    return Results.of((name, seed, summary(i, seed)) for i, name in enumerate(names) for seed in (0, 1))


def test_the_rows_are_the_methods_with_the_best_in_bold_and_the_spread() -> None:
    lines = results("fedavg", "fedbn").latex().splitlines()
    assert "photo\\_1 & s\\&p & average" in next(line for line in lines if line.startswith("method"))
    fedavg, fedbn = (next(line for line in lines if line.startswith(name)) for name in ("fedavg", "fedbn"))
    # The standard deviation of 0.60 and 0.62 is 0.02 / sqrt(2).
    assert fedbn.startswith("fedbn & \\textbf{61.0} {\\scriptsize $\\pm$ 1.4} & \\textbf{51.0}")
    assert fedavg.startswith("fedavg & 51.0 {\\scriptsize $\\pm$ 1.4} & 41.0")
    assert fedbn.endswith(" \\\\")


def test_it_uses_booktabs_and_every_row_has_every_column() -> None:
    text = results("fedavg", "a&b", "fedbn").latex()
    lines = text.splitlines()
    for rule in ("\\toprule", "\\midrule", "\\bottomrule"):
        assert lines.count(rule) == 1
    columns = next(line for line in lines if line.startswith("\\begin{tabular}")).partition("}{")[2][:-1]
    assert columns == "lrrr"
    rows = [line for line in lines if line.endswith(" \\\\")]
    assert len(rows) == 4
    assert {row.replace("\\&", "").count("&") for row in rows} == {3}


def test_a_domain_that_a_method_lacks_is_a_dash() -> None:
    entries = [("a", 0, {"domains": {"x": 0.5}, "accuracy": 0.5, "result": "last"})]
    entries.append(("b", 0, {"domains": {"y": 0.5}, "accuracy": 0.5, "result": "last"}))
    assert "b & -- & " in Results.of(entries).latex()  # type: ignore[arg-type]


@pytest.mark.parametrize("character", list("\\&%$#_{}~^<>|±"))
def test_what_means_something_to_latex_is_escaped(character: str) -> None:
    escaped = latex_text(f"a{character}b")
    assert escaped != f"a{character}b"
    assert escaped.startswith("a")
    assert escaped.endswith("b")
    assert latex_text("fedavg+gn (x=0.1)") == "fedavg+gn (x=0.1)"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="LaTeX is not installed")
def test_latex_takes_it(tmp_path: Path) -> None:
    table = results("fedavg", "a\\&%$#_{}~^<>|±").latex()
    document = f"\\documentclass{{article}}\\usepackage{{booktabs}}\\begin{{document}}{table}\\end{{document}}"
    (tmp_path / "t.tex").write_text(document)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 0


def test_a_bar_in_a_name_does_not_break_a_markdown_table() -> None:
    line = next(line for line in results("a|b", "c").markdown().splitlines() if line.startswith("| a"))
    assert line.startswith("| a\\|b | ")
