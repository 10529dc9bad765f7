"""A fingerprint of code as it will run: of a class, of what its functions call, and of the constants they use.

It is taken of the compiled code in memory. So it knows a class that was typed into a notebook as well as one in a
file, and neither a comment nor a moved line is a change. Followed are the package's own functions and the user's, not
those of Python and of installed packages. Another Python compiles otherwise: compare under one `python_version`.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...))
WRAPPERS = (functools.partial, functools._lru_cache_wrapper, MethodType)
# Of a class: what it says of itself, and what Python keeps there.
NOT_CODE = {
    *("__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__", "__annotate_func__"),
    *("__annotations_cache__", "__qualname__", "__firstlineno__", "__static_attributes__", "__abstractmethods__"),
    *("_abc_impl", "__orig_bases__", "__parameters__", "__dataclass_fields__", "__dataclass_params__"),
    *("__match_args__", "__slots__", "paper"),
}


def python_version() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def code_digest(*things: Any) -> str:
    """Of classes, functions and plain values, and of all the code that they lead to."""
    return _Reading(things).hexdigest()


def is_followed(module: str | None) -> bool:
    """Whether a module is this package's or the user's: neither of Python nor installed."""
    top = (module or "").partition(".")[0]
    if top in ("fedkeel", "__main__"):
        return True
    if top in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file


class _Reading:
    def __init__(self, things: Iterable[Any]) -> None:
        self._hash = hashlib.sha256()
        self._seen: dict[int, Any] = {}  # kept, so that no number is given twice
        self._packages: set[str] = set()
        for thing in things:
            kind = thing if isinstance(thing, type | FunctionType) else type(thing)
            self._packages.add((kind.__module__ or "").partition(".")[0])  # followed, though it be installed
            self._tell(thing)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()[:32]

    def _say(self, *words: object) -> None:
        self._hash.update((" ".join(map(str, words)) + "\n").encode("utf-8", "surrogatepass"))

    def _follows(self, thing: Any) -> bool:
        module = getattr(thing, "__module__", None)
        package = (module or "").partition(".")[0]
        own = package in self._packages and package not in (*sys.stdlib_module_names, "torch")
        return own or is_followed(module)

    def _tell(self, value: Any) -> None:
        if isinstance(value, PLAIN):
            self._say(type(value).__name__, repr(value))
        elif isinstance(value, tuple | list | frozenset | set):
            # A set has no order, and that of its parts in memory changes from process to process.
            parts = sorted(value, key=repr) if isinstance(value, frozenset | set) else value
            self._say(type(value).__name__, len(value))
            for part in parts:
                self._tell(part)
        elif isinstance(value, dict):
            self._say("dict", len(value))
            for pair in value.items():
                self._tell(pair)
        elif isinstance(value, CodeType):
            self._tell_code(value)
        elif isinstance(value, Tensor):
            self._say("tensor", value.dtype, tuple(value.shape))
            self._hash.update(value.detach().cpu().contiguous().flatten().view(dtype=torch.uint8).numpy().tobytes())
        elif isinstance(value, np.ndarray | np.generic):
            self._say("array", value.dtype, value.shape)
            self._tell(value.tolist() if value.dtype.hasobject else value.tobytes())
        elif id(value) in self._seen:
            self._say("again", getattr(value, "__qualname__", type(value).__qualname__))
        else:
            self._seen[id(value)] = value
            self._tell_thing(value)

    def _tell_thing(self, value: Any) -> None:
        if isinstance(value, FunctionType):
            self._tell_function(value)
        elif isinstance(value, type):
            self._tell_class(value)
        elif inner := _inner(value):
            self._say(type(value).__name__)
            for part in inner:
                self._tell(part)
        elif isinstance(value, ModuleType):
            self._say("module", value.__name__)
        else:
            self._say("a", type(value).__module__, type(value).__qualname__, getattr(value, "__name__", ""))
            if self._follows(type(value)):
                self._tell(type(value))
            if self._follows(type(value)) or isinstance(value, SimpleNamespace):
                self._tell({name: part for name, part in getattr(value, "__dict__", {}).items() if _is_fixed(part)})

    def _tell_class(self, kind: type) -> None:
        for cls in kind.__mro__:
            self._say("class", cls.__module__ if not self._follows(cls) else "", cls.__name__)
            if not self._follows(cls):
                continue
            self._seen[id(cls)] = cls
            for name, value in sorted(vars(cls).items()):
                if name not in NOT_CODE and _is_constant(name, value):
                    self._say("has", name)
                    self._tell(value)

    def _tell_function(self, function: FunctionType) -> None:
        self._say("def")
        self._tell_code(function.__code__, function.__doc__)
        self._tell((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                self._refer("", cell.cell_contents, ())
            except ValueError:  # not filled yet
                self._say("empty")
        names = sorted(set(_names(function.__code__)))
        counted = {step.argval for step in dis.get_instructions(function) if step.opname == "STORE_GLOBAL"}
        for name in names:
            if name in function.__globals__ and name not in counted:
                self._refer(name, function.__globals__[name], names)

    def _refer(self, name: str, value: Any, names: Iterable[str]) -> None:
        """To something that code uses: what follows from it is told where it is the package's or the user's."""
        self._say("uses", name)
        if isinstance(value, ModuleType):
            self._say("module", value.__name__)
            if is_followed(value.__name__):
                for attribute in names:
                    found = vars(value).get(attribute)
                    if found is not None:
                        self._refer(attribute, found, [name for name in names if name != attribute])
        elif isinstance(value, FunctionType | type):
            if self._follows(value):
                self._tell(value)
            else:
                self._say(value.__module__, value.__qualname__)
        elif _is_fixed(value) or isinstance(value, WRAPPERS) or name.isupper():
            self._tell(value)
        else:  # something that may change while it runs: a table that is filled, a list that grows
            self._say("a", type(value).__module__, type(value).__qualname__)
            if self._follows(type(value)):
                self._tell(type(value))

    def _tell_code(self, code: CodeType, documentation: str | None = None) -> None:
        parameters = code.co_argcount + code.co_kwonlyargcount
        self._say("code", code.co_code.hex(), getattr(code, "co_exceptiontable", b"").hex())
        self._say(code.co_names, code.co_varnames[:parameters], code.co_freevars)
        for place, constant in enumerate(code.co_consts):
            if place > 0 or documentation is None or constant != documentation:
                self._tell(constant)


def _inner(value: Any) -> list[Any]:
    """The functions inside of what wraps them."""
    if isinstance(value, staticmethod | classmethod | MethodType):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, functools.partial):
        return [value.func, value.args, dict(value.keywords)]
    wrapped: Callable[..., Any] | None = getattr(value, "__wrapped__", None)
    return [wrapped] if wrapped is not None else []


def _is_fixed(value: Any) -> bool:
    return isinstance(value, (*PLAIN, tuple, frozenset, np.generic))


def _is_constant(name: str, value: Any) -> bool:
    """What is in a class and cannot grow while it is used: a list or table by its name in capitals alone."""
    return name.isupper() or not isinstance(value, list | dict | set | Tensor)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
