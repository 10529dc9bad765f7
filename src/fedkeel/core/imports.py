"""Code of one's own: what is imported because a person named it, with `--import FILE` or in Python.

A run directory may be a stranger's, and opening it must run no code that came with it: it has a copy of each file to
read, and a run whose names are not known is refused with the file to name.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedkeel.config import Config
from fedkeel.errors import FedkeelError, StoreError, first_line
from fedkeel.files import digest, read_sealed, seal
from fedkeel.registry import REGISTRIES, Entry, log

FILE, COPIES = "imports.json", "code"
_imported: dict[str, bytes] = {}  # what the files were that are imported
_under_way: list[str] = []


@dataclass(frozen=True)
class OwnModule:
    """A module that a run's names come from."""

    name: str
    file: str  # nothing for a notebook
    registers: Sequence[Sequence[str]]  # group, kind and name of what the run uses

    def missing(self) -> str:
        """What is not known here, as part of a sentence."""
        unknown = [f"{k} '{name}'" for group, k, name in self.registers if name not in REGISTRIES.get(group, ())]
        return f"the {' and the '.join(unknown)}" if unknown else ""


# -- importing -------------------------------------------------------------------------------------------------------
def load(what: str) -> None:
    """Import a file, or a module by its name."""
    before = [entry for _, entry in own_entries()]
    path = Path(what).expanduser()
    is_new = load_file(path) if path.suffix == ".py" or path.is_file() else load_module(what)
    if is_new and [entry for _, entry in own_entries()] == before:
        log.warning(
            f"'{what}' registers nothing: what it defines gets a name by a decorator, @fedkeel.register('name')."
        )


def load_file(path: Path) -> bool:
    """As for a script, its folder is where it finds others. Whether it was not imported already."""
    path = path.absolute()
    if path.suffix != ".py" or not path.is_file():
        raise FedkeelError(f"'{path}' is not a Python file that is there: give one, or the name of a module.")
    text = path.read_bytes()
    if _imported.get(str(path)) == text:
        return False
    known = sys.modules.get(path.stem)
    taken = known is not None and getattr(known, "__file__", None) != str(path)
    name = f"{path.stem}_{digest(str(path).encode())[:8]}" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    before, sys.modules[name] = sys.modules.get(name), module
    try:
        with _explained(path.name):
            # Not by its loader and __pycache__, which an edit of the same size in the same second would not reach.
            exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))
    except BaseException:
        sys.modules.pop(name) if before is None else sys.modules.update({name: before})
        raise
    _imported[str(path)] = text
    return True


def load_module(name: str) -> bool:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if not re.fullmatch(r"\w+(\.\w+)*", name) or name == "__main__":
        raise FedkeelError(f"'{name}' is neither a Python file nor the name of a module: give one to import.")
    is_new = name not in sys.modules
    with _explained(name):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if name != error.name and not name.startswith(f"{error.name}."):
                raise  # what it imports itself is missing
            raise FedkeelError("there is no such module; give a file, like my_methods.py") from None
    return is_new


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Whatever goes wrong in somebody's code is told in one sentence, with the line."""
    _under_way.append(what)
    try:
        yield
    except FedkeelError as error:
        raise FedkeelError(f"'{what}' cannot be imported: {str(error).rstrip('.')}.") from error
    except (Exception, SystemExit) as error:
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        places = [place for place in frames if not place[0].startswith(("<frozen", __file__))]
        if isinstance(error, SyntaxError):
            places = [(error.filename or what, error.lineno)]
        where = [f"{Path(file).name}, line {line}: " for file, line in places[-1:]]
        said = error.msg if isinstance(error, SyntaxError) else first_line(error)
        raise FedkeelError(f"'{what}' cannot be imported, {''.join(where)}{type(error).__name__}: {said}.") from error
    finally:
        _under_way.pop()


def refuse_while_importing() -> None:
    """Called where runs begin: a file that is imported for what it defines must not train as well."""
    if _under_way:
        raise FedkeelError("it starts a run while it is imported: put the call under 'if __name__ == \"__main__\":'")


# -- what runs use ---------------------------------------------------------------------------------------------------
def own_entries() -> list[tuple[str, Entry[Any]]]:
    return [(group, entry) for group, registry in REGISTRIES.items() for entry in registry.own()]


def used(config: Config) -> list[tuple[str, Entry[Any]]]:
    """What the configuration names that is not Fedkeel's, with its group."""
    text = "\n".join(value for value in config.to_dict().values() if isinstance(value, str))

    def is_named(name: str) -> bool:
        return re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text) is not None

    return [(group, entry) for group, entry in own_entries() if is_named(entry.name)]


def homes(config: Config) -> list[OwnModule]:
    """The modules that define what the configuration names."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for group, entry in used(config):
        found.setdefault(entry.module, []).append((group, REGISTRIES[group].kind, entry.name))
    made = []
    for name, registers in found.items():
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        path = str(Path(file).absolute()) if file.endswith(".py") and Path(file).is_file() else ""
        made.append(OwnModule(Path(path).stem if name == "__main__" and path else name, path, registers))
    return made


def text_of(module: OwnModule) -> bytes:
    """What a module was imported from, as far as that is known."""
    return _imported.get(module.file) or (Path(module.file).read_bytes() if module.file else b"")


# -- run directories -------------------------------------------------------------------------------------------------
def records(config: Config) -> dict[str, bytes]:
    """The files in which a run directory keeps it; the copies are to be read, and never imported by themselves."""
    modules = homes(config)
    if not modules:
        return {}
    copies = {f"{COPIES}/{module.name}.py": text_of(module) for module in modules if module.file}
    return {FILE: seal({"modules": [asdict(module) for module in modules]})} | copies


def remembered(directory: Path) -> list[tuple[OwnModule, str]]:
    """The modules that the names of a run come from, and what of them is not known here."""
    stored = read_sealed(directory / FILE) or {"modules": []}
    try:
        modules = [OwnModule(**table) for table in stored["modules"]]
        return [(module, module.missing()) for module in modules]
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"'{directory / FILE}' is of another version of Fedkeel: read it with that one.") from error


def files(directory: Path) -> list[str]:
    """What `--import` would be given to make the run once more."""
    return [module.file for module, _ in remembered(directory) if module.file]


def refuse_unknown_names(directory: Path) -> None:
    """Before a run is used again: what it names must have been imported."""
    for module, what in remembered(directory):
        if what:
            place = f"of '{module.file}'" if module.file else "which was typed into a notebook (put it into a file)"
            copy = directory / COPIES / f"{module.name}.py"
            read = f" ('{copy}' is what it was)" if copy.is_file() else ""
            raise StoreError(
                f"'{directory}' uses {what} {place}: name the file with --import, or import it in Python{read}."
            )
