"""The method that CONTRIBUTING shows whole."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fedkeel.cli import main
from fedkeel.core import imports
from fedkeel.methods import METHODS
from tests import tiny

ROOT = Path(__file__).parents[1]


def section(title: str) -> str:
    return (ROOT / "CONTRIBUTING.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def code(title: str) -> list[str]:
    """The Python blocks of a section."""
    return re.findall(r"```python\n(.*?)```", section(title), re.DOTALL)


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The method that is shown whole, in a file of its own."""
    (block,) = code("Add a method")
    file = tmp_path / "cautious_heads.py"
    file.write_text(block)
    monkeypatch.setattr(sys, "path", [*sys.path])
    imports.load(str(file))
    yield file
    del METHODS._entries["cautious-heads"], sys.modules["cautious_heads"]


@pytest.mark.usefixtures("shown")
def test_the_method_that_is_shown_has_its_rule_and_its_heads(tmp_path: Path) -> None:
    first = tiny.setup("cautious-heads").worker.model.state_dict()
    models = {}
    for step in (1.0, 0.5):
        run = tiny.run(tmp_path / f"{step}", f"cautious-heads(step={step})", rounds=1)
        models[step] = safetensors.torch.load_file(run.directory / "model.safetensors")
        assert {path.stem for path in (run.directory / "personal").iterdir()} == set(tiny.SIZES)
    assert not any(name.startswith("head.") for name in models[1.0])
    weights = [name for name in models[1.0] if name.endswith(("weight", "bias"))]
    assert weights
    for name in weights:
        torch.testing.assert_close(models[0.5][name], (first[name] + models[1.0][name]) / 2)


def test_the_method_that_is_shown_is_for_the_command_line_too(shown: Path, tmp_path: Path) -> None:
    words = [
        "--method",
        "fedprox+cautious-heads",
        "--subsample",
        "10",
        "--model",
        "simple_cnn(width=2)",
        "--rounds",
        "1",
    ]
    assert main(["run", "--import", str(shown), *words, "--quiet", "--out", str(tmp_path / "r")]) == 0
