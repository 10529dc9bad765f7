"""Every example runs, as a user would run it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
EXAMPLES, NOTEBOOKS = sorted(FOLDER.glob("*.py")), sorted(FOLDER.glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs_and_prints_its_run(example: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Run('runs/" in done.stdout


@pytest.mark.slow
def test_the_observer_of_the_page_is_told(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    page = (FOLDER.parent / "docs" / "python.md").read_text()
    (block,) = (text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Stopwatch" in text)
    exec(block, {"__name__": "page"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "fedavg, from round 0 to 3"
    assert [line[0] for line in lines[1:] if line[0].isdigit()] == ["0", "1", "2"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(path, 4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    pages = [output.data["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert len(pages) == 3  # the federation, the comparison and its frame
    places = [output.data["text/plain"] for output in outputs if output.output_type == "display_data"]
    assert ["runs 3/3" in places[0], "round 12/12" in places[1], len(places)] == [True, True, 2]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_its_outputs(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []
