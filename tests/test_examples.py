"""Every example runs, as a main program in a folder of its own."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.processes import exit_code, forked

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs_and_prints_its_run(example: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"

    def act() -> None:
        os.chdir(tmp_path)
        sys.argv, sys.path[:0] = [str(example)], [str(FOLDER)]
        runpy.run_path(str(example), run_name="__main__")

    assert exit_code(forked(act, said)) == 0, said.read_text()
    assert "Run('runs/" in said.read_text()


@pytest.mark.slow
def test_the_observer_of_the_page_is_told(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    page = (FOLDER.parent / "docs" / "python.md").read_text()
    (block,) = (text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Stopwatch" in text)
    exec(block, {"__name__": "page"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fedavg, from round 0 to 3"
    assert [line[0] for line in lines[1:] if line[0].isdigit()] == ["0", "1", "2"]
