"""The README's table of the papers is what the ledger says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import papers
from ledger import Ledger

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.slow
def test_the_readme_is_what_the_ledger_says() -> None:
    text = README.read_text()
    assert papers.rendered(text, Ledger()) == text, "run tools/papers.py"


def test_each_paper_has_one_line_and_what_is_around_the_table_stays(tmp_path: Path) -> None:
    text = f"before\n{papers.BEGIN}old{papers.END}after\n"
    new = papers.rendered(text, Ledger(tmp_path))
    rows = [line for line in new.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[0] for row in rows] == ["| GReg", "| HBN", "| FedWon", "| FedCoda", "| UniVarFL"]
    assert all(row.endswith("not run | not run |") for row in rows)
    assert new.startswith("before\n")
    assert new.endswith("after\n")
    assert "old" not in new
