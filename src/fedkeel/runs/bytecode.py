"""A fingerprint of code as it will run: of a class, of what its functions call, and of the constants they use.

It is taken of the compiled code in memory. So it knows a class that was typed into a notebook as well as one in a
file, and neither a comment nor a moved line is a change. Followed are the package's own functions and the user's, not
those of Python and of installed packages. Another Python compiles otherwise: compare under one `python_version`.
"""

import dis
import functools
import hashlib
import sys
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
FIXED = (*PLAIN, tuple, frozenset, np.generic)  # cannot change while code runs; a list grows, a table is filled
READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")  # instructions that look up a global name
WRAPPERS: dict[type, tuple[str, ...]] = {  # where each of them keeps the functions inside of it
    **dict.fromkeys((staticmethod, classmethod, MethodType), ("__func__",)),
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    functools.partial: ("func", "args", "keywords"),
    type(functools.lru_cache(abs)): ("__wrapped__",),
}


def python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def code_digest(*things: Any) -> str:
    """Of classes, functions and plain values, and of all the code that they lead to."""
    reading, found, pending = _Reading(things), hashlib.sha256(), list(reversed(things))
    while pending:
        text, parts = reading.take_apart(pending.pop())
        found.update(f"{text} {len(parts)}\n".encode("utf-8", "surrogatepass"))
        pending += reversed(parts)
    return found.hexdigest()[:32]


def is_followed(module: str | None) -> bool:
    """Whether a module is this package's or the user's: neither of Python nor installed."""
    top = (module or "").partition(".")[0]
    if top in ("fedkeel", "__main__"):
        return True
    if top in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


class _Use(NamedTuple):
    """A name in a function, what it stands for there, and all the names in that function."""

    name: str
    value: Any
    names: Sequence[str] = ()


class _Reading:
    def __init__(self, things: Sequence[Any]) -> None:
        kinds = [thing if isinstance(thing, type | FunctionType) else type(thing) for thing in things]
        packages = {(kind.__module__ or "").partition(".")[0] for kind in kinds}  # followed, though it be installed
        self._packages = packages - {"torch", *sys.stdlib_module_names}
        self._seen: dict[int, Any] = {}  # kept, so that no number is given twice

    def take_apart(self, value: Any) -> tuple[str, Sequence[Any]]:
        """What there is to say of a value, and the values that it leads to."""
        if isinstance(value, PLAIN):
            return repr(value), ()
        if isinstance(value, _Use):
            return self._use(*value)
        if isinstance(value, frozenset | set):  # in memory, their order changes from process to process
            return "set", sorted(value, key=repr)
        if isinstance(value, tuple | list):
            return type(value).__name__, value
        if isinstance(value, dict):
            return "dict", list(value.items())
        if isinstance(value, CodeType):
            return "code", _code(value)
        if isinstance(value, Tensor | np.ndarray | np.generic):
            return f"array {value.dtype} {tuple(value.shape)}", [value.tolist()]
        if id(value) in self._seen:
            return f"again {getattr(value, '__qualname__', type(value).__qualname__)}", ()
        self._seen[id(value)] = value
        if isinstance(value, FunctionType):
            return "def", _function(value)
        if isinstance(value, type):
            return "class", self._class(value)
        if inner := _inner(value):
            return type(value).__name__, inner
        own = self._follows(type(value))
        state = {name: part for name, part in getattr(value, "__dict__", {}).items() if isinstance(part, FIXED)}
        parts = [*([type(value)] if own else []), *([state] if own or isinstance(value, SimpleNamespace) else [])]
        return f"a {_path(type(value))} {getattr(value, '__name__', '')}", parts

    def _follows(self, thing: Any) -> bool:
        return (thing.__module__ or "").partition(".")[0] in self._packages or is_followed(thing.__module__)

    def _class(self, kind: type) -> list[Any]:
        parts: list[Any] = []
        for cls in kind.__mro__:
            if not self._follows(cls):
                parts.append(_path(cls))
                continue
            self._seen[id(cls)] = cls
            parts += [cls.__name__, *(entry for entry in sorted(vars(cls).items()) if _is_code(*entry))]
        return parts

    def _use(self, name: str, value: Any, names: Sequence[str]) -> tuple[str, Sequence[Any]]:
        """What follows from a name is told where it is the package's or the user's."""
        if isinstance(value, ModuleType):
            inside = vars(value) if is_followed(value.__name__) else {}
            used = [attribute for attribute in names if inside.get(attribute) is not None]
            others = [_Use(used_name, inside[used_name], [n for n in names if n != used_name]) for used_name in used]
            return f"uses {name}, module {value.__name__}", others
        if isinstance(value, FunctionType | type):
            return f"uses {name}", [value if self._follows(value) else _path(value)]
        if isinstance(value, FIXED) or name.isupper() or _inner(value):
            return f"uses {name}", [value]
        return f"uses {name}, a {_path(type(value))}", [type(value)] if self._follows(type(value)) else ()


def _function(function: FunctionType) -> list[Any]:
    names = read = sorted(names_in(function.__code__))
    if function.__globals__.get("__name__") == "__main__":  # names come and go: `self.run` is not a notebook's `run`
        steps = (step for code in codes_in(function.__code__) for step in dis.get_instructions(code))
        read = sorted({step.argval for step in steps if step.opname in READS})
    stores = dis.opmap["STORE_GLOBAL"] in function.__code__.co_code[::2]  # hardly ever, and to take it apart takes long
    own = dis.get_instructions(function) if stores else ()
    written = {step.argval for step in own if step.opname == "STORE_GLOBAL"}
    within = {name: function.__globals__[name] for name in read if name in function.__globals__ and name not in written}
    cells: list[Any] = []
    for cell in function.__closure__ or ():
        try:
            cells.append(_Use("", cell.cell_contents))
        except ValueError:  # not filled yet
            cells.append(None)
    uses = [_Use(name, within[name], names) for name in within]
    code = _code(function.__code__, function.__doc__)
    return [*code, function.__defaults__, function.__kwdefaults__, *cells, *uses]


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


def names_in(code: CodeType) -> set[str]:
    """What these ask for by name."""
    return {name for inner in codes_in(code) for name in inner.co_names}


def _code(code: CodeType, documentation: str | None = None) -> list[Any]:
    documented = documentation is not None and code.co_consts[:1] == (documentation,)
    parameters = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    handlers = getattr(code, "co_exceptiontable", b"")  # since Python 3.11
    return [code.co_code, handlers, code.co_names, parameters, code.co_freevars, *code.co_consts[documented:]]


def _is_code(name: str, value: Any) -> bool:
    """What decides what a class does: not what Python keeps there, nor what may grow while it is used."""
    if name.startswith("__"):
        return isinstance(value, FunctionType | classmethod | staticmethod | property) and "annotate" not in name
    return name.isupper() or not (name in ("paper", "_abc_impl") or isinstance(value, list | dict | set | Tensor))


def _inner(value: Any) -> list[Any]:
    """The functions inside of what wraps them."""
    attributes = next((where for kind, where in WRAPPERS.items() if isinstance(value, kind)), ())
    return [getattr(value, attribute) for attribute in attributes]


def _path(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
