"""The tutorials of the book: each runs from top to bottom, and is kept with what it puts out."""

from __future__ import annotations

import copy
import importlib.util
import re
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

ROOT = Path(__file__).parents[1]
loader = SourceFileLoader("notebooks", str(ROOT / ".ci" / "notebooks"))
spec = importlib.util.spec_from_loader("notebooks", loader)
assert spec is not None
notebooks = importlib.util.module_from_spec(spec)
loader.exec_module(notebooks)

PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))
NAMES = {"own-images", "own-method", "label-shift", "unseen-domain", "one-machine-and-three", "paper-figure"}
NEEDS = {"one-machine-and-three": "nvflare", "own-images": "vl_convert", "label-shift": "vl_convert"}
NEEDS["paper-figure"] = "vl_convert"
each = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


def shown(notebook: Any) -> dict[str, list[list[str]]]:
    """What the cells show: of each the kinds of its tables and figures. Notes may differ from one CPU to another."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {cell.source: [sorted(one.data) for one in cell.outputs if "data" in one] for cell in code}


@pytest.mark.slow
@each
def test_it_runs_from_top_to_bottom_and_shows_what_is_kept(path: Path, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(path.stem, "pandas"))
    kept, typed = nbformat.read(path, 4), tmp_path / path.name
    for cell in kept.cells:  # a seed less: what is said of the results holds for fewer too
        cell.source = re.sub(r"\bseeds=(\d)", lambda seeds: f"seeds={int(seeds[1]) - 1}", cell.source)
    nbformat.write(kept, typed)
    notebook = notebooks.executed(typed, tmp_path)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    told = [output.text for output in outputs if output.get("name") == "stderr"]
    assert [text for text in told if "joblib will operate in serial mode" not in text] == []  # as without /dev/shm
    bars = [one.data["text/plain"] for one in outputs if one.output_type == "display_data" and len(one.data) == 1]
    assert [bar for bar in bars if not re.search(r"(?:runs|round) (\d+)/\1\b", bar)] == []  # they stay, at the end
    assert shown(notebooks.cleaned(notebook, [str(tmp_path)])) == shown(kept)


def test_these_are_the_tutorials() -> None:
    assert {path.stem for path in PATHS} == NAMES


@each
def test_it_is_kept_with_its_outputs_and_without_what_differs(path: Path) -> None:
    kept = nbformat.read(path, 4)
    assert notebooks.cleaned(copy.deepcopy(kept)) == kept, f"run .ci/notebooks {path.stem}"
    cells = [cell for cell in kept.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)], f"run .ci/notebooks {path.stem}"
    outputs = [output for cell in cells for output in cell.outputs]
    assert {"text/html", "image/png", "image/svg+xml"} & {kind for one in outputs for kind in one.get("data", {})}
    assert [one for one in outputs if one.output_type == "error" or one.get("name") == "stderr"] == []
    assert re.findall(r"/(?:tmp|home|root|Users|work)/", path.read_text()) == []


@each
def test_it_says_its_goal_and_where_to_read_on(path: Path) -> None:
    texts = [cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "markdown"]
    assert re.match(r"# .+\n\n\*\*Goal:\*\* ", texts[0])
    assert "## Read on" in texts[-1]
    links = re.findall(r"\]\(((?!https:)[^)#]+)", "\n".join(texts))
    assert links
    assert [link for link in links if not (path.parent / link).exists()] == []


def test_progress_colours_and_vega_are_not_kept() -> None:
    made = nbformat.v4.new_output
    bar = made("display_data", {"text/plain": "fedavg seed 0 ━━━ round 3/3  left 0:00"})
    said = made("stream", name="stdout", text="fedavg       81.2 %\nfedkeel: to be known\n")
    figure = {"text/plain": "Drawing('a')", "image/svg+xml": "<svg/>", "application/vnd.vegalite.v5+json": {}}
    result = made("execute_result", figure, execution_count=1, metadata={"when": "now"})
    first, second = notebooks.kept([bar, said, result])
    assert [first.text, first.name] == ["fedkeel: to be known\n", "stdout"]
    assert second == made("execute_result", {k: figure[k] for k in ("image/svg+xml", "text/plain")}, execution_count=1)
    assert notebooks.kept([made("stream", name="stdout", text="\x1b[1mscan\x1b[0m 90\n")])[0].text == "scan 90\n"


def test_a_place_of_this_machine_and_a_large_file_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    output = nbformat.v4.new_output("stream", name="stdout", text="written to /somewhere/else\n")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", outputs=[output])])
    with pytest.raises(SystemExit, match="'/somewhere', which is a place on this machine"):
        notebooks.cleaned(copy.deepcopy(notebook), ["/somewhere"])
    monkeypatch.setattr(notebooks, "LARGEST", 100)
    with pytest.raises(SystemExit, match="100 are the most: show less"):
        notebooks.cleaned(notebook)
