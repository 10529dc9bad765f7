"""Code of one's own: what is imported because a person named its file, with `--import FILE` or in Python.

A run directory may be a stranger's, and opening it must run no code that came with it: it has a copy of each file to
read, and the file itself is named each time.
"""

from __future__ import annotations

import re
import sys
import traceback
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any

from fedkeel.config import Config
from fedkeel.errors import FedkeelError, StoreError, first_line
from fedkeel.registry import REGISTRIES, Entry

COPIES = "code"
_under_way: list[str] = []


class SourceItself(SourceFileLoader):
    """Reads the file, whatever bytecode of an earlier edit lies beside it, and leaves none."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def load(file: str | Path) -> None:
    """Import a Python file. As for a script, its folder is where it finds others."""
    path = Path(file).expanduser().absolute()
    if path.suffix != ".py" or not path.is_file():
        raise FedkeelError(f"'{file}' is not a Python file that is there: give the path of one.")
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return
    if known is not None:
        raise FedkeelError(f"'{file}' cannot be imported, there is a module '{path.stem}' already: rename the file.")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    loader = SourceItself(path.stem, str(path))
    spec = spec_from_file_location(path.stem, path, loader=loader)
    assert spec is not None
    _under_way.append(path.name)
    try:
        module = sys.modules[path.stem] = module_from_spec(spec)
        loader.exec_module(module)
    except BaseException as error:
        sys.modules.pop(path.stem, None)
        if isinstance(error, Exception | SystemExit):
            raise refusal(path, error) from error
        raise
    finally:
        _under_way.pop()


def refusal(path: Path, error: BaseException) -> FedkeelError:
    """What is said of a file that failed."""
    if isinstance(error, FedkeelError):
        return FedkeelError(f"'{path.name}' cannot be imported: {error}")
    if isinstance(error, SyntaxError):
        return FedkeelError(f"'{path.name}' cannot be imported, SyntaxError: {first_line(error)}.")
    last = traceback.extract_tb(error.__traceback__)[-1]
    where, said = f"{Path(last.filename).name}, line {last.lineno}", f"{type(error).__name__}: {first_line(error)}"
    return FedkeelError(f"'{path.name}' cannot be imported, {where}: {said}.")


def refuse_while_importing() -> None:
    """Called where runs begin: a file that is imported for what it defines must not train as well."""
    if _under_way:
        raise FedkeelError("it starts a run while it is imported: put the call under 'if __name__ == \"__main__\":'.")


# -- what runs use ---------------------------------------------------------------------------------------------------
def used(config: Config) -> list[tuple[str, Entry[Any]]]:
    """What the configuration names that is not Fedkeel's, with its group."""
    text = "\n".join(value for value in config.to_dict().values() if isinstance(value, str))
    entries = [(group, entry) for group, registry in REGISTRIES.items() for entry in registry.own()]
    return [(g, entry) for g, entry in entries if re.search(rf"(?<![\w-]){re.escape(entry.name)}(?![\w-])", text)]


def file_of(entry: Entry[Any]) -> Path | None:
    """The file that registers it; None for what was typed into a notebook."""
    file = Path(getattr(sys.modules.get(entry.module), "__file__", None) or "")
    return file.absolute() if file.suffix == ".py" else None


def imported() -> set[str]:
    """The names of the files that register something here."""
    entries = (entry for registry in REGISTRIES.values() for entry in registry.own())
    return {file.name for entry in entries if (file := file_of(entry))}


def files(config: Config) -> list[Path]:
    """The files that what the configuration names comes from."""
    return list(dict.fromkeys(file for _, entry in used(config) if (file := file_of(entry)) and file.is_file()))


# -- run directories -------------------------------------------------------------------------------------------------
def records(config: Config) -> dict[str, bytes]:
    """Copies for the run directory, to be read by a person and never imported."""
    return {f"{COPIES}/{file.name}": file.read_bytes() for file in files(config)}


def copies(directory: Path) -> list[Path]:
    """The copies that a run has."""
    return sorted((directory / COPIES).glob("*.py"))


def refuse_unknown_names(directory: Path) -> None:
    """Before a run is used again: what it names must have been imported."""
    for copy in copies(directory):
        if copy.name not in imported():
            raise StoreError(
                f"'{directory}' uses a file '{copy.name}': name it with --import, or import it in Python ('{copy}' is "
                "what it was)."
            )
