"""The house stays as it was built: few modules at the top, short files, short functions, imports where they belong."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "fedkeel"
FILES = sorted(PACKAGE.rglob("*.py"))
# Lines of each room (".": the modules at the top): what is added must be smaller than what goes.
MOST_LINES = {
    ".": 1642,
    "analysis": 1166,
    "cli": 1930,
    "core": 1687,
    "data": 4615,
    "deploy": 1575,
    "drawing": 410,
    "engine": 2505,
    "engine/executors": 1641,
    "experiments": 3305,
    "formulas": 1091,
    "methods": 2540,
    "models": 810,
    "nn": 2224,
    "report": 1440,
    "runs": 3123,
    "trust": 612,
}
# What takes long to import, or need not be installed: only there is an import inside of a function right.
HEAVY = {
    *("flwr", "opacus", "pandas", "vl_convert", "onnx", "onnxruntime", "onnxscript", "timm", "torchvision", "pyarrow"),
    *("tensorboard", "mlflow", "triton", "scipy", "sklearn", "cryptography", "rich", "uvicorn", "starlette", "httpx"),
    *("grpc", "fastapi", "sqlalchemy", "torch", "numpy", "PIL", "psutil", "pydicom", "playwright", "optuna", "ray"),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def functions(path: Path) -> Iterator[tuple[Function, ast.ClassDef | None]]:
    """Every function of a file, and the class it is a method of."""
    tree = ast.parse(path.read_text())
    owner = {child: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in node.body}
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node, owner.get(node)


def is_free(function: Function, owner: ast.ClassDef | None) -> bool:
    """Whose parameters are not ours to choose: constructors, Triton's kernels, and what autograd calls."""
    names = {ast.unparse(decorator) for decorator in function.decorator_list}
    of_autograd = owner is not None and any("Function" in ast.unparse(base) for base in owner.bases)
    return function.name == "__init__" or any("triton" in name for name in names) or of_autograd


def parameters(function: Function) -> int:
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    return len([argument for argument in named if argument.arg not in ("self", "cls", "ctx")])


def test_few_modules_lie_at_the_top() -> None:
    assert len(list(PACKAGE.glob("*.py"))) <= 16


def room(path: Path) -> str:
    first, *rest = path.relative_to(PACKAGE).parts
    return "." if not rest else "engine/executors" if (first, rest[0]) == ("engine", "executors") else first


@pytest.mark.parametrize("name", sorted({room(path) for path in FILES}))
def test_a_room_is_small(name: str) -> None:
    assert sum(len(path.read_text().splitlines()) for path in FILES if room(path) == name) <= MOST_LINES[name]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_is_short_and_so_are_its_functions(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 350
    long = [f.name for f, _ in functions(path) if f.end_lineno is not None and f.end_lineno - f.lineno >= 60]
    assert long == [], "longer than 60 lines"
    wide = [f.name for f, owner in functions(path) if parameters(f) > 7 and not is_free(f, owner)]
    assert wide == [], "more than seven parameters"


def inner_imports(path: Path) -> set[str]:
    """The top names of what is imported inside of functions."""
    found: set[str] = set()
    for function, _ in functions(path):
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
            elif isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
    return found


@pytest.mark.parametrize("path", [path for path in FILES if "cli" not in path.parts], ids=name_of)
def test_only_what_is_heavy_is_imported_inside_of_a_function(path: Path) -> None:
    assert inner_imports(path) - HEAVY == set()


@pytest.mark.parametrize("name", ["losses", "aggregation", "state", "messages"])
def test_public_modules_are_where_users_import_them_from(name: str) -> None:
    short = importlib.import_module(f"fedkeel.{name}")
    room = importlib.import_module(f"fedkeel.{'formulas' if name in ('losses', 'aggregation') else 'core'}.{name}")
    own = [thing for thing in vars(room) if getattr(getattr(room, thing), "__module__", "") == room.__name__]
    public = getattr(room, "__all__", [thing for thing in own if not thing.startswith("_")])
    assert all(getattr(short, thing) is getattr(room, thing) for thing in public)
