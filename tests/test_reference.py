"""The reference in docs/reference: every public name stands there, is explained, and its examples are true."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

import fedkeel

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "reference").glob("*.md"))
# What users import from. Where a module says nothing itself (`__all__`), all that is defined in it is public.
PUBLIC = (
    *("fedkeel", "fedkeel.data", "fedkeel.models", "fedkeel.nn", "fedkeel.methods", "fedkeel.losses"),
    *("fedkeel.aggregation", "fedkeel.state", "fedkeel.messages", "fedkeel.engine", "fedkeel.engine.metrics"),
    *(
        "fedkeel.engine.losses",
        "fedkeel.engine.schedules",
        "fedkeel.analysis",
        "fedkeel.report",
        "fedkeel.drawing.show",
    ),
    *("fedkeel.trust.privacy", "fedkeel.deploy", "fedkeel.registry"),
    *(f"fedkeel.formulas.{name}" for name in ("clustering", "diagnostics", "measures", "prototypes")),
    *("fedkeel.formulas.robust", "fedkeel.formulas.similarity"),
)
# Their examples train a network.
TRAIN = {"fedkeel.simulation", "fedkeel.runs.run", "fedkeel.experiments.comparison", "fedkeel.analysis"}
TRAIN |= {"fedkeel.report", "fedkeel.report.paper"}
KINDS = {"methods": "methods", "transforms": "data", "partitions": "data", "data": "data"}


def examples(module: ModuleType) -> list[doctest.DocTest]:
    given = {**vars(module), "torch": torch, "nn": nn, "fedkeel": fedkeel}
    return [test for test in doctest.DocTestFinder().find(module, module.__name__, globs=given) if test.examples]


def wrong(module: ModuleType) -> list[str]:
    runner, told = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), list[str]()
    for test in examples(module):
        runner.run(test, out=told.append)
    return told


MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(fedkeel.__path__, "fedkeel.")
    if ">>>" in Path(found.module_finder.find_spec(found.name).origin).read_text()  # type: ignore
)


@pytest.mark.parametrize("name", [name for name in MODULES if name not in TRAIN])
def test_examples_are_true(name: str) -> None:
    module = importlib.import_module(name)
    assert examples(module)
    assert wrong(module) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TRAIN))
def test_examples_that_train_are_true(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    assert examples(module)
    assert wrong(module) == []
