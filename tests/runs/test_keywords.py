"""The options of a run are typed: an editor completes them, and mypy finds mistakes in their names and values."""

from __future__ import annotations

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from fedkeel.config import option_names
from fedkeel.runs.keywords import CompareOptions, RunOptions

ROOT = Path(__file__).parents[2]
loader = SourceFileLoader("keywords", str(ROOT / ".ci" / "keywords"))
spec = importlib.util.spec_from_loader("keywords", loader)
assert spec is not None
keywords = importlib.util.module_from_spec(spec)
loader.exec_module(keywords)

SNIPPET = """
import fedkeel
from torch import nn
fedkeel.simulate(rounds=3, learning_rate=1, method="fedbn", model=nn.Linear(1, 1), seed=2, weighting="uniform")
fedkeel.simulate({"rounds": 3}, verbose=False, directory="x", device="cpu")
fedkeel.compare(["fedavg"], seeds=2, model=nn.Linear(1, 1), batch_size=8, verbose=True)
fedkeel.resume("x", workers=3, changed_code=True)
fedkeel.simulate(learningrate=3)
fedkeel.simulate(rounds="x")
fedkeel.simulate(weighting="by-age")
fedkeel.simulate(verbose=3)
fedkeel.compare(["fedavg"], seed=1)
fedkeel.compare(["fedavg"], learning_rate="0.1")
fedkeel.compare([3])
fedkeel.resume("x", batch_size=3)
"""


def test_the_file_is_made_of_the_configuration() -> None:
    assert keywords.FILE.read_text() == keywords.text(), "run .ci/keywords"
    assert {*RunOptions.__annotations__, "method", "model"} == {*option_names()}
    assert {*CompareOptions.__annotations__, "method", "seed"} - {"federation"} == {*option_names()}


@pytest.mark.slow
def test_mypy_finds_wrong_options_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api = pytest.importorskip("mypy.api")
    (tmp_path / "snippet.py").write_text(SNIPPET)
    monkeypatch.chdir(ROOT)  # with what `make types` has found out already
    said, _, _ = api.run([str(tmp_path / "snippet.py"), "--config-file", "pyproject.toml"])
    first = SNIPPET.splitlines().index("fedkeel.simulate(learningrate=3)") + 1
    found = {int(line.split(":")[1]) for line in said.splitlines() if "snippet.py:" in line and ": error:" in line}
    assert sorted(found) == [*range(first, first + 8)], said
