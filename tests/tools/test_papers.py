"""The README's table of the papers is what the ledger says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from fedkeel.experiments.ledger import Ledger

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("papers", ROOT / "tools" / "papers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_readme_is_what_the_ledger_says(tool: ModuleType) -> None:
    text = (ROOT / "README.md").read_text()
    assert tool.rendered(text, Ledger(ROOT / "results")) == text, "run tools/papers.py"


def test_each_paper_has_one_line_and_what_is_around_the_table_stays(tool: ModuleType, tmp_path: Path) -> None:
    text = f"before\n{tool.BEGIN}old{tool.END}after\n"
    new = tool.rendered(text, Ledger(tmp_path))
    rows = [line for line in new.splitlines() if line.startswith("| ")][2:]
    assert [row.split(" | ")[0] for row in rows] == ["| GReg", "| HBN", "| FedWon", "| FedCoda", "| UniVarFL"]
    assert all(row.endswith("not run | not run |") for row in rows)
    assert new.startswith("before\n")
    assert new.endswith("after\n")
    assert "old" not in new
