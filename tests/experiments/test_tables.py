"""Tables for papers: LaTeX with booktabs, the best in bold, the spread beside it, and any name printed as it is."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fedkeel.experiments.tables import Results


def results(*names: str) -> Results:
    """Method i has 50 + 10 i percent with the first seed and two points more with each of two others."""

    def summary(number: int, seed: int) -> dict[str, object]:
        value = 0.5 + 0.1 * number + 0.02 * seed
        return {"domains": {"photo_1": value, "s&p": value - 0.1}, "accuracy": value - 0.05, "result": "last"}

    return Results.of((name, seed, summary(i, seed)) for i, name in enumerate(names) for seed in (0, 1, 2))


def test_the_rows_are_the_methods_with_the_best_in_bold_and_the_spread() -> None:
    lines = results("fedavg", "fedbn").latex().splitlines()
    assert "photo\\_1 & s\\&p & average" in next(line for line in lines if line.startswith("method"))
    fedavg, fedbn = (next(line for line in lines if line.startswith(name)) for name in ("fedavg", "fedbn"))
    assert fedbn.startswith("fedbn & \\textbf{62.0} {\\scriptsize $\\pm$ 2.0} & \\textbf{52.0}")
    assert fedavg.startswith("fedavg & 52.0 {\\scriptsize $\\pm$ 2.0} & 42.0")
    assert fedbn.endswith(" \\\\")


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="LaTeX is not installed")
def test_latex_takes_it(tmp_path: Path) -> None:
    text = results("fedavg", "fed_bn(50%)", "a&b#{$}").latex()
    document = f"\\documentclass{{article}}\\usepackage{{booktabs}}\\begin{{document}}{text}\\end{{document}}"
    (tmp_path / "t.tex").write_text(document)
    command = ["pdflatex", "-draftmode", "-interaction=nonstopmode", "-halt-on-error", "t.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_a_bar_in_a_name_does_not_break_a_markdown_table() -> None:
    line = next(line for line in results("a|b", "c").markdown().splitlines() if line.startswith("| a"))
    assert line.startswith("| a\\|b | ")


HOSTILE = (
    "[/b]",
    "[bold]x[/bold]",
    "=1+1",
    "-1",
    "\x1b[31mred",
    "a|b",
    "<script>alert(1)</script>",
    "a\nb",
    "[x](y:z)",
    ":bomb:",
)


def named(*names: str) -> Results:
    values = dict.fromkeys(names, 0.5)
    return Results.of((name, 0, {"domains": values, "accuracy": 0.5, "result": "last"}) for name in ("a", "@b", *names))


def test_markdown_has_no_html_and_as_many_columns_as_it_should() -> None:
    text = named(*HOSTILE).markdown()
    assert "<" not in text
    assert "\x1b" not in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 2 + len(HOSTILE)
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {2 + len(HOSTILE) + 2 - 1}


def test_no_cell_of_a_csv_file_is_a_formula_and_numbers_stay_numbers() -> None:
    rows = list(csv.reader(named(*HOSTILE).csv().splitlines()))
    assert all(not cell.startswith(("=", "+", "-", "@", "\t")) for row in rows for cell in row)
    assert rows[0].index("'=1+1_mean") == 2 + 2 * HOSTILE.index("=1+1")
    assert {row[2] for row in rows[1:]} == {"0.5"}
    assert rows[2][0] == "'@b"


def test_text_has_a_line_for_each_method_and_nothing_that_a_terminal_obeys() -> None:
    text = named(*HOSTILE).text()
    assert "\x1b" not in text
    assert len(text.splitlines()) == 2 + 2 + len(HOSTILE) + 2
