"""Things that have a name a person can type: methods, models, data sets, partitions, executors."""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from fedkeel.errors import FedkeelError, nearest, unknown
from fedkeel.options import checked, described, hints_of

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


# Reading one takes longer than a small step.
signature_of = lru_cache(maxsize=1024)(inspect.signature)


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A registered builder with the sentence that `fedkeel list` shows for it."""

    name: str
    build: Callable[..., T]
    summary: str
    paper: str
    given: Collection[str] = ()  # what `build` takes from the engine, and nobody types

    def options(self) -> dict[str, inspect.Parameter]:
        """The options that `build` takes, by name."""
        signature = signature_of(self.build)
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return {name: p for name, p in signature.parameters.items() if p.kind in kinds and name not in self.given}

    def takes_any_option(self) -> bool:
        parameters = signature_of(self.build).parameters.values()
        return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

    def check_options(self, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        """The options as `build` wants them; one that it does not take, or not with this value, is refused."""
        valid, hints = self.options(), hints_of(self.build)
        for name in options:
            if name not in valid and not self.takes_any_option():
                ending = nearest(name, valid) if valid else "it takes none."
                raise FedkeelError(f"The {kind} '{self.name}' has no option '{name}': {ending}")
        return {
            name: checked(value, hints[name], f"The '{name}' of {self.name}") if name in hints else value
            for name, value in options.items()
        }


def first_sentence(text: str) -> str:
    """The lines until one ends a sentence or a paragraph, as one.

    >>> first_sentence("A sentence that is longer\\nthan a line. Another one.\\n\\nMore.")
    'A sentence that is longer than a line. Another one.'
    """
    taken: list[str] = []
    for line in (line.strip() for line in text.strip().splitlines()):
        if not line:
            break
        taken.append(line)
        if line.endswith((".", "!", "?")):
            break
    return " ".join(taken)


def discover(package: str) -> None:
    """Import every module of a package that is being imported: a file in its folder registers itself."""
    for module in pkgutil.iter_modules(sys.modules[package].__path__):
        importlib.import_module(f"{package}.{module.name}")


class Registry(Generic[T]):
    """A table of named builders. `kind` is the word used in messages, e.g. "method"; `given`: see `Entry`."""

    def __init__(self, kind: str, *, given: Collection[str] = ()) -> None:
        self.kind, self.given = kind, given
        self._entries: dict[str, Entry[T]] = {}

    def register(self, name: str, *, summary: str = "", paper: str = "") -> Callable[[F], F]:
        """Decorator: make `build` known under `name`. The summary defaults to the docstring's first sentence."""

        def remember(build: F) -> F:
            cited = paper or getattr(build, "paper", "")
            shown = summary or first_sentence(inspect.getdoc(build) or "")
            self._entries[name] = Entry(name, build, shown, cited, self.given)
            return build

        return remember

    def entry(self, name: str) -> Entry[T]:
        if not isinstance(name, str):
            raise FedkeelError(f"The {self.kind} is {described(name)}: give its name as text.")
        if name not in self._entries:
            raise FedkeelError(unknown(self.kind, name, self._entries))
        return self._entries[name]

    def build(self, name: str, *args: Any, **options: Any) -> T:
        """Build what is registered under `name`, after checking the options' names."""
        entry = self.entry(name)
        return entry.build(*args, **entry.check_options(self.kind, options))

    def make(self, name: str, **options: Any) -> T:
        """As `build`, where nothing but the options can go wrong: whatever they cause is told in one sentence."""
        try:
            return self.build(name, **options)
        except FedkeelError:
            raise
        except (TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            given = ", ".join(f"{option}={described(value)}" for option, value in options.items())
            reason = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
            raise FedkeelError(f"The {self.kind} '{name}' cannot be built with {given}: {reason}.") from error

    def names(self) -> list[str]:
        return sorted(self._entries)

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries[name] for name in self.names())

    def __contains__(self, name: object) -> bool:
        return name in self._entries
