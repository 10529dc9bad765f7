"""Code of the user's on nodes that do not have its files: it comes along, whole."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedkeel.config import Config
from fedkeel.core import imports
from fedkeel.engine.executors.ray.station import OwnCode
from fedkeel.methods import METHODS

METHOD = """
import fedkeel
{imports}

@fedkeel.register("own-shrink")
class Shrink(fedkeel.Method):
    '''Shrinks gradients.'''
    by = factor()
"""


def forget() -> None:
    """As in a process that has never heard of it."""
    METHODS._entries.pop("own-shrink", None)
    imports._texts.clear()
    for name in [name for name in sys.modules if name.startswith("own_")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "there").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "there"))
    forget()
    yield
    forget()


def sent() -> OwnCode:
    """What a driver sends along."""
    (module,) = imports.homes(imports.used(Config(method="own-shrink")))
    code = OwnCode(module, imports.texts(module))
    assert code.module.missing() == ""
    forget()
    sys.path[:] = [one for one in sys.path if "own" not in one]
    assert "own-shrink" in code.module.missing()
    return code


def in_a_file(tmp_path: Path) -> Path:
    """A file, and one beside it that it imports."""
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own_factor.py").write_text("def factor():\n    return 0.5\n")
    (folder / "own_shrink.py").write_text(METHOD.format(imports="from own_factor import factor"))
    imports.load(str(folder / "own_shrink.py"))
    return folder


def in_a_package(tmp_path: Path) -> Path:
    """Of a package, whose parts import each other."""
    folder = tmp_path / "own" / "own_package"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("HALF = 0.5\n")
    (folder / "inner" / "__init__.py").write_text("")
    (folder / "inner" / "factors.py").write_text("from .. import HALF\ndef factor():\n    return HALF\n")
    (folder / "shrink.py").write_text(METHOD.format(imports="from .inner.factors import factor"))
    sys.path.insert(0, str(folder.parent))
    imports.load("own_package.shrink")
    return folder


@pytest.mark.parametrize("made", [in_a_file, in_a_package])
def test_a_node_without_the_file_gets_a_copy(tmp_path: Path, made: object) -> None:
    assert callable(made)
    folder = made(tmp_path)
    code = sent()
    shutil.rmtree(folder)
    code.bring()
    assert METHODS.build("own-shrink").by == 0.5  # type: ignore[attr-defined]
    assert list((tmp_path / "there").rglob("*.py"))


@pytest.mark.parametrize("made", [in_a_file, in_a_package])
def test_a_node_with_the_same_file_needs_none(tmp_path: Path, made: object) -> None:
    assert callable(made)
    made(tmp_path)
    sent().bring()
    assert METHODS.build("own-shrink").by == 0.5  # type: ignore[attr-defined]
    assert not list((tmp_path / "there").rglob("*.py"))


@pytest.mark.parametrize("name", ["own_shrink.py", "own_factor.py"])
def test_a_file_that_says_something_else_there_is_not_used(tmp_path: Path, name: str) -> None:
    folder = in_a_file(tmp_path)
    code = sent()
    changed = (folder / name).read_text().replace("factor()\n", "9.0\n").replace("0.5", "9.0")
    (folder / name).write_text(changed)
    code.bring()
    assert METHODS.build("own-shrink").by == 0.5  # type: ignore[attr-defined]


def test_what_is_known_is_not_imported_again(tmp_path: Path) -> None:
    in_a_file(tmp_path)
    code = sent()
    code.bring()
    before = METHODS._entries["own-shrink"]
    code.bring()
    assert METHODS._entries["own-shrink"] is before
