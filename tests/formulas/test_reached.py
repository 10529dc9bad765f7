"""A formula that a paper states is the function that runs: everything in `fedkeel.formulas` is used by the package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fedkeel

PACKAGE = Path(fedkeel.__file__).parent


def formulas(package: Path) -> dict[str, str]:
    """The public functions of `formulas/`, each with its module."""
    return {
        node.name: path.stem
        for path in sorted((package / "formulas").glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }


def used_names(tree: ast.AST) -> set[str]:
    """Names that code refers to, as `mean(...)` or as `aggregation.mean(...)`; texts and imports do not count."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names | {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def imported_formulas(tree: ast.AST, known: dict[str, str]) -> set[str]:
    """By their names, or all of a module that is imported whole."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedkeel.formulas."):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in ("fedkeel", "fedkeel.formulas"):
            modules = {alias.name for alias in node.names}
            found |= {name for name, module in known.items() if module in modules}
    return found


def only_tested(package: Path) -> list[str]:
    """The formulas that no code outside of `formulas/` uses, nor a formula that is used."""
    known, uses, todo = formulas(package), {}, set()
    for path in package.rglob("*.py"):
        tree = ast.parse(path.read_text())
        if path.parent == package / "formulas":
            uses |= {node.name: used_names(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
        else:
            todo |= imported_formulas(tree, known) & used_names(tree)
    reached: set[str] = set()
    while todo:
        name = todo.pop()
        reached.add(name)
        todo |= (uses.get(name, set()) & uses.keys()) - reached
    return sorted(f"{module}.{name}" for name, module in known.items() if name not in reached)


@pytest.mark.slow
def test_every_formula_is_reached_by_a_run_a_diagnostic_or_a_method() -> None:
    assert only_tested(PACKAGE) == []


def test_the_search_finds_what_nothing_calls(tmp_path: Path) -> None:
    (tmp_path / "formulas").mkdir()
    (tmp_path / "formulas" / "losses.py").write_text(
        "def called(x): return _inside(x)\n"
        "def _inside(x): return below(x)\n"
        "def below(x): return x\n"
        "def of_a_module(x): return x\n"
        "def imported_alone(x): return x\n"
        "def calls_itself(x): return calls_itself(x)\n"
    )
    (tmp_path / "method.py").write_text(
        "from fedkeel.formulas import losses\n"
        "from fedkeel.formulas.losses import called, imported_alone\n"
        "def loss(x):\n"
        "    'As calls_itself.'\n"
        "    return called(x) + losses.of_a_module(x)\n"
    )
    assert only_tested(tmp_path) == ["losses.calls_itself", "losses.imported_alone"]
