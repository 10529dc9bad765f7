"""Code of one's own: what is imported because a person named it, and what a run remembers of it.

    load("my_methods.py")      for `--import`: whatever the file registers is known from then on
    records(config)            for a run directory: which modules its names come from, and a copy of each to read
    recall(directory)          before a run is used again

A run directory may be a stranger's, and opening it must run no code that came with it. So nothing is imported because
a file says so: `recall` imports only what this user has named on this machine before, while it is still the same
text. Anything else is asked for with `--import`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

from fedkeel.config import Config
from fedkeel.errors import FedkeelError, StoreError, first_line
from fedkeel.files import digest, read_sealed, seal, state_folder
from fedkeel.registry import REGISTRIES, Entry, log

FILE, COPIES, NAMED = "imports.json", "code", "imports.jsonl"
_texts: dict[str, bytes] = {}  # what the files were that are imported
_under_way: list[str] = []
THEIRS = frozenset({"fedkeel", *sys.stdlib_module_names})  # also below a folder of one's own: a checkout, a home


@dataclass(frozen=True)
class OwnModule:
    """A module that a run's names come from."""

    name: str
    file: str  # nothing for a notebook
    digest: str  # of the file's text
    registers: Sequence[Sequence[str]]  # group, kind and name of what the run uses
    beside: Sequence[Sequence[str]] = ()  # name, file and digest of the modules of its folder that it imports

    def missing(self) -> str:
        """What is not known here, as part of a sentence."""
        unknown = [f"{k} '{name}'" for group, k, name in self.registers if name not in REGISTRIES.get(group, ())]
        return f"the {' and the '.join(unknown)}" if unknown else ""


# -- importing -------------------------------------------------------------------------------------------------------
def load(what: str) -> None:
    """Import a file, or a module by its name, and remember that this user has named it."""
    before = {(group, e.name, id(e.build)) for group, e in own_entries()}
    path = Path(what).expanduser()
    module = load_file(path) if path.suffix == ".py" or path.is_file() else load_module(what)
    if {(group, e.name, id(e.build)) for group, e in own_entries()} == before and module is not None:
        log.warning(
            f"'{what}' registers nothing: what it defines gets a name by a decorator, @fedkeel.register('name')."
        )
    if file := getattr(module, "__file__", None):
        trust(Path(file).absolute())


def load_file(path: Path) -> ModuleType | None:
    """The module of a file; None where it is imported already. As for a script, its folder is where it finds others."""
    path = path.absolute()
    if path.suffix != ".py" or not path.is_file():
        raise FedkeelError(f"'{path}' is not a Python file that is there: give one, or the name of a module.")
    text = path.read_bytes()
    if _texts.get(str(path)) == text:
        return None
    name = path.stem
    if _is_taken(name, path):
        name = f"{name}_{digest(str(path).encode())[:8]}"
    module = ModuleType(name)
    module.__file__ = str(path)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    before, sys.modules[name] = sys.modules.get(name), module
    try:
        with _explained(path.name):
            # Not by way of __pycache__, which an edit of the same size in the same second would not reach.
            exec(compile(text, str(path), "exec", dont_inherit=True), vars(module))
    except BaseException:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before
        raise
    _texts[str(path)] = text
    return module


def _is_taken(name: str, path: Path) -> bool:
    """Whether a module of that name is another one, imported or not."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__file__", None) != str(path)
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    return spec is not None and spec.origin != str(path)


def load_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    if not re.fullmatch(r"\w+(\.\w+)*", name) or name == "__main__":
        raise FedkeelError(f"'{name}' is neither a Python file nor the name of a module: give one to import.")
    with _explained(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if name != error.name and not name.startswith(f"{error.name}."):
                raise  # what it imports itself is missing
            raise FedkeelError("there is no such module; give a file, like my_methods.py") from None


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


def homes(entries: Sequence[tuple[str, Entry[Any]]]) -> list[OwnModule]:
    """The modules that these were written in."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for group, entry in entries:
        found.setdefault(entry.module, []).append((group, REGISTRIES[group].kind, entry.name))
    made = []
    for name, registers in found.items():
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        path = str(Path(file).absolute()) if file.endswith(".py") and Path(file).is_file() else ""
        name = Path(path).stem if name == "__main__" and path else name
        others = [(other, file, digest(_text(file))) for other, file in beside(name, path).items()] if path else []
        made.append(OwnModule(name, path, digest(_text(path)), registers, others))
    return made


def beside(name: str, path: str) -> dict[str, str]:
    """The files in its folder, or below, of what a module imports, and of what that imports; by its name."""
    found, pending = {name: path}, [name]
    while pending:
        for other in _imported(pending.pop(0), found):
            file = Path(getattr(sys.modules.get(other), "__file__", None) or "").absolute()
            installed = other.partition(".")[0] in THEIRS or {"site-packages", "dist-packages"} & {*file.parts}
            own = file.is_relative_to(Path(path).parent) and not installed
            if own and file.suffix == ".py" and file.is_file() and str(file) not in found.values():
                found[other] = str(file)
                pending.append(other)
    return {other: file for other, file in found.items() if file != path}


def _imported(name: str, files: Mapping[str, str]) -> Iterator[str]:
    """What the text of a module says that it imports, by full names."""
    with suppress(SyntaxError, OSError):  # edited since
        for node in ast.walk(ast.parse(_text(files[name]))):
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                package = getattr(sys.modules.get(name), "__package__", None)
                with suppress(ImportError):  # one that was only tried
                    whole = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
                    found = [whole, *(f"{whole}.{alias.name}" for alias in node.names)]
            yield from (one for full in found for one in accumulate(full.split("."), "{}.{}".format))


def texts(module: OwnModule) -> dict[str, bytes]:
    """Of a module and of those beside it, by their names."""
    return {name: _text(file) for name, file in ((module.name, module.file), *((n, f) for n, f, _ in module.beside))}


def _text(path: str) -> bytes:
    """What a module was imported from, as far as that is known."""
    return _texts.get(path) or (Path(path).read_bytes() if path else b"")


def bring(module: OwnModule) -> None:
    """Import it from where it was."""
    path, package = Path(module.file), Path(module.file).name == "__init__.py"
    parts = (path.parent if package else path.with_suffix("")).parts
    inner = module.name.split(".")
    if parts[-len(inner) :] != tuple(inner) or (len(inner) == 1 and not package):
        load_file(path)  # also where the name is not that of the file
        return
    sys.path.insert(0, str(Path(*parts[: -len(inner)])))
    load_module(module.name)


# -- run directories -------------------------------------------------------------------------------------------------
def records(config: Config) -> dict[str, bytes]:
    """The files in which a run directory keeps it; the copies are to be read, and never imported by themselves."""
    modules = homes(used(config))
    if not modules:
        return {}
    files = {FILE: seal({"modules": [asdict(module) for module in modules]})}
    for module in modules:
        if module.file:
            files[f"{COPIES}/{module.name}.py"] = _text(module.file)
        for name, file, _ in module.beside:
            files[f"{COPIES}/{name}.py"] = _text(file)
    return files


def remembered(directory: Path) -> list[tuple[OwnModule, str]]:
    """The modules that the names of a run come from, and what of them is not known here."""
    stored: Mapping[str, Any] = read_sealed(directory / FILE) or {"modules": []}
    try:
        modules = [OwnModule(**table) for table in stored["modules"]]
        if not all(isinstance(text, str) for m in modules for _, file, known in m.beside for text in (file, known)):
            raise TypeError("'beside' is no text")
        return [(module, module.missing()) for module in modules]
    except (KeyError, TypeError, ValueError) as error:
        raise StoreError(f"'{directory / FILE}' is of another version of Fedkeel: read it with that one.") from error


def files(directory: Path) -> list[str]:
    """What `--import` would be given to make the run once more."""
    return [module.file for module, _ in remembered(directory) if module.file]


def recall(directory: Path) -> None:
    """Import what the names of a run come from, where they are not known here and the user has named it before."""
    for module, what in remembered(directory):
        if not what:
            continue
        if reason := _unusable(module):
            typed = ", which was typed into a notebook: put it into a file, and"
            where = f" of '{module.file}', which {reason}:" if module.file else typed
            copy = directory / COPIES / f"{module.name}.py"
            read = f"; '{copy}' is what it was" if copy.is_file() else ""
            raise StoreError(
                f"'{directory}' uses {what}{where} name the file with --import, or import it in Python{read}."
            )
        bring(module)


def _unusable(module: OwnModule) -> str:
    for _, file, known in (("", module.file, module.digest), *module.beside):
        there = bool(file) and Path(file).is_file()
        if not there or digest(Path(file).read_bytes()) != known:
            reason = "has changed since" if there else "is not there"
            return reason if file == module.file else f"imports '{file}', which {reason}"
    named = _entry(Path(module.file), module.digest) in _named()
    return "" if named else "was not named with --import on this machine before"


# -- what this user has named ----------------------------------------------------------------------------------------
def trust(path: Path) -> None:
    """Remember that this user has named the file, with the text it was imported from."""
    entry = _entry(path, digest(_text(str(path))))
    with suppress(OSError):  # without a home that can be written, `recall` asks each time
        if entry not in _named():
            state_folder().mkdir(parents=True, exist_ok=True)
            with open(state_folder() / NAMED, "a") as file:
                file.write(f"{entry}\n")


def _entry(path: Path, text_digest: str) -> str:
    return json.dumps([text_digest, str(path)])


def _named() -> list[str]:
    try:
        return (state_folder() / NAMED).read_text().splitlines()
    except (OSError, ValueError):
        return []
