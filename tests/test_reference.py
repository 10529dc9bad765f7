"""The reference, docs/reference: every public name stands there and is explained, and its examples are true.

Names are public that the `__all__` of a module in `PUBLIC` has, or else all that it defines. Each has an example, or
says why it has none ("No example: ..."), or where there is one ("see `name`").
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import inspect
import pkgutil
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import fedkeel
from fedkeel.registry import REGISTRIES

ROOT = Path(__file__).parents[1]
PAGES = [path.read_text() for path in sorted((ROOT / "docs" / "reference").glob("*.md"))]
FORMULAS = ("calibration", "clustering", "measures", "prototypes", "robust", "similarity")
PUBLIC = [
    *("fedkeel", "fedkeel.data", "fedkeel.models", "fedkeel.nn", "fedkeel.methods", "fedkeel.losses"),
    *("fedkeel.aggregation", *(f"fedkeel.formulas.{name}" for name in FORMULAS), "fedkeel.state", "fedkeel.messages"),
    *("fedkeel.engine", "fedkeel.engine.metrics", "fedkeel.engine.losses", "fedkeel.engine.schedules"),
    *("fedkeel.analysis", "fedkeel.report", "fedkeel.trust.privacy"),
]
# Modules whose examples train a network.
TRAIN = [
    *("fedkeel.analysis", "fedkeel.experiments.comparison", "fedkeel.report", "fedkeel.report.paper"),
    *("fedkeel.runs.run", "fedkeel.simulation"),
]
REASON = re.compile(r"No example|[Ss]ee `|with an example|which has an example")


def text_of(name: str) -> str:
    return Path(str(importlib.util.find_spec(name).origin)).read_text()  # type: ignore[union-attr]


MODULES = ["fedkeel"] + [found.name for found in pkgutil.walk_packages(fedkeel.__path__, "fedkeel.")]
WITH_EXAMPLES = [name for name in MODULES if re.search(r"^ *>>> ", text_of(name), re.MULTILINE)]


# -- examples ---------------------------------------------------------------------------------------------------------
def wrong(module: ModuleType) -> list[str]:
    """What doctest says of examples that do not come out as they stand there."""
    given = {**vars(module), "torch": torch, "nn": nn, "fedkeel": fedkeel}
    tests = [test for test in doctest.DocTestFinder().find(module, globs=given) if test.examples]
    assert tests
    assert not any(doctest.SKIP in example.options for test in tests for example in test.examples)
    runner, said = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), list[str]()
    for test in tests:
        runner.run(test, out=said.append)
    return said


@pytest.fixture(autouse=True)
def _forgets_what_examples_register(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in REGISTRIES.values():
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.mark.parametrize("name", [name for name in WITH_EXAMPLES if name not in TRAIN])
def test_examples_come_out_as_they_stand(name: str) -> None:
    assert wrong(importlib.import_module(name)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAIN)
def test_examples_that_train_come_out_as_they_stand(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert wrong(importlib.import_module(name)) == []


# -- names ------------------------------------------------------------------------------------------------------------
@cache
def public() -> dict[str, Any]:
    """Every public thing, by the name that it is imported by."""
    found: dict[str, Any] = {}
    for path in PUBLIC:
        module = importlib.import_module(path)
        own = [n for n, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__]
        names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
        found |= {f"{path}.{name}": getattr(module, name) for name in names}
    return {path: thing for path, thing in found.items() if not isinstance(thing, ModuleType)}


@cache
def named() -> list[str]:
    """What the pages name. A function that has the name of its file is named with both: else the file is meant."""
    return re.findall(r"^::: (\S+)$", "\n".join(PAGES), re.MULTILINE)


def test_every_public_name_is_on_a_page() -> None:
    others = [path for path in named() if path not in PUBLIC and not path.startswith("fedkeel.deploy.")]
    shown = [pkgutil.resolve_name(path) for path in others]
    ids = {id(thing) for thing in shown if not isinstance(thing, ModuleType)}
    ids |= {id(thing) for path, thing in public().items() if path.rpartition(".")[0] in named()}  # all of a module
    assert [path for path, thing in public().items() if id(thing) not in ids] == []


def assigned(name: str) -> bool:
    """Whether a text stands behind the assignment of this name."""
    return any(re.search(rf'^{name}\b.* = .*\n"""\w', text_of(module), re.MULTILINE) for module in MODULES)


def is_explained(path: str, thing: Any) -> bool:
    if not inspect.isclass(thing) and not inspect.isroutine(inspect.unwrap(thing)):
        return assigned(path.rpartition(".")[2])  # a registry, a type, an app
    text = inspect.getdoc(thing) or ""
    return ">>> " in text or bool(REASON.search(" ".join(text.split())))


def test_every_public_name_has_an_example_or_says_why_not() -> None:
    assert [path for path, thing in public().items() if not is_explained(path, thing)] == []


def test_attributes_are_explained_one_by_one() -> None:
    """What stands behind the first of several names would be shown as its type."""
    together = re.compile(r"^ +Attributes:\n(?: +\S.*\n)*? +\w+, \w+.*:", re.MULTILINE)
    assert [name for name in MODULES if together.search(text_of(name))] == []


def test_the_apps_are_on_a_page_and_explained() -> None:
    assert all(f"fedkeel.deploy.flower.{name}" in named() and assigned(name) for name in ("server_app", "client_app"))


def test_whatever_is_chosen_by_name_is_on_a_page() -> None:
    entries = {(entry.module, entry.name) for registry in REGISTRIES.values() for entry in registry if not entry.is_own}
    told_in_words = ("torch.optim", "fedkeel.engine.metrics.of_confusion")
    shown = {path.rpartition(".")[0] for path in named()} | {*named()}
    assert {entry for entry in entries if entry[0] not in shown and not entry[0].startswith(told_in_words)} == set()


def test_a_method_has_an_example_in_its_own_section() -> None:
    pages = "\n".join(page.read_text() for page in (ROOT / "docs" / "methods").glob("*.md"))
    names = [entry.name for entry in REGISTRIES["methods"] if not entry.is_own]
    parts = re.split(rf"^##? ({'|'.join(names)})$", pages, flags=re.MULTILINE | re.IGNORECASE)
    sections = dict(zip(map(str.lower, parts[1::2]), parts[2::2], strict=True))
    for name in names:
        assert re.search(rf"^fedkeel \w+ .*\b{name}\b", sections[name], re.MULTILINE), name


def test_a_formula_of_a_docstring_is_set_in_the_book() -> None:
    pytest.importorskip("griffe")
    place = importlib.util.spec_from_file_location("reference", ROOT / ".ci" / "reference.py")
    assert place is not None
    assert place.loader is not None
    reference = importlib.util.module_from_spec(place)
    place.loader.exec_module(reference)
    assert doctest.testmod(reference) == (0, 1)
    text = "The mean.\n\n    m = 1/K sum_k p_k,    of all\n\nArgs:\n    p: (K, d)"
    shown = " ".join(reference.with_formulas(text).split())
    assert shown == r"The mean. $$m = \frac{1}{K}\;\sum _{k}\;p_{k},$$ of all Args: p: (K, d)"
