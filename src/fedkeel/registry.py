"""Things that have a name a person can type: methods, models, data sets, partitions, executors."""

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeVar

from fedkeel.errors import FedkeelError, first_line, nearest, unknown
from fedkeel.options import checked, described, hints_of, refuse_beside

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
    module: str = "fedkeel"  # that defines it
    given: Collection[str] = ()  # what `build` takes from the engine, and nobody types

    @property
    def is_own(self) -> bool:
        """Whether it is the user's, or of another package, and not Fedkeel's."""
        return self.module.partition(".")[0] not in ("fedkeel", "torch")

    def options(self) -> dict[str, inspect.Parameter]:
        """The options that `build` takes, by name."""
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        takes = signature_of(self.build).parameters.items()
        return {name: taken for name, taken in takes if taken.kind in kinds and name not in self.given}

    def check_options(self, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        """The options as `build` wants them; one that it does not take, or not with this value, is refused."""
        valid, hints = self.options(), hints_of(self.build)
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature_of(self.build).parameters.values())
        for name in options:
            if name not in valid and not takes_any:
                ending = nearest(name, valid) if valid else "it takes none."
                raise FedkeelError(f"The {kind} '{self.name}' has no option '{name}': {ending}")
        taken = {
            name: checked(value, hints[name], f"The '{name}' of {self.name}") if name in hints else value
            for name, value in options.items()
        }
        refuse_beside(hints, options, {name: valid[name].default for name in valid} | taken, self.name)
        return taken


def first_sentence(text: str) -> str:
    """The lines until one ends a sentence or a paragraph, as one.

    >>> first_sentence("A sentence that is longer\\nthan a line. Another one.\\n\\nMore.")
    'A sentence that is longer than a line. Another one.'
    """
    paragraph = text.strip().partition("\n\n")[0]
    return " ".join(re.split(r"(?<=[.!?])\n", paragraph)[0].split())


def discover(package: str) -> None:
    """Import every module of a package that is being imported: a file in its folder registers itself."""
    for module in pkgutil.iter_modules(sys.modules[package].__path__):
        importlib.import_module(f"{package}.{module.name}")


class Registry(Generic[T]):
    """A table of named builders. `kind` is the word used in messages, e.g. "method"; `given`: see `Entry`.

    >>> from fedkeel.methods import METHODS
    >>> METHODS.make("fedprox", mu=0.1).mu, "fedbn" in METHODS, METHODS.entry("fedprox").options()["mu"].default
    (0.1, True, 0.01)
    """

    def __init__(self, kind: str, group: str = "", *, given: Collection[str] = ()) -> None:
        self.kind, self.given = kind, given
        self.group = group or kind + ("es" if kind.endswith("s") else "s")
        self._entries: dict[str, Entry[T]] = {}
        REGISTRIES[self.group] = self

    def register(self, name: str, *, summary: str = "", paper: str = "") -> Callable[[F], F]:
        """Decorator: make `build` known under `name`. The summary defaults to the docstring's first sentence."""

        def remember(build: F) -> F:
            cited = paper or getattr(build, "paper", "")
            text = summary or first_sentence(inspect.getdoc(build) or "")
            entry = Entry(name, build, text, cited, getattr(build, "__module__", None) or "", self.given)
            if entry.is_own and name in self._entries and not self._entries[name].is_own:
                raise FedkeelError(f"There is a {self.kind} '{name}' of Fedkeel's own: give yours another name.")
            self._entries[name] = entry
            return build

        return remember

    def entry(self, name: str) -> Entry[T]:
        """What is registered under `name`: its builder, summary and paper."""
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
            reason = first_line(error)
            raise FedkeelError(f"The {self.kind} '{name}' cannot be built with {given}: {reason}.") from error

    def names(self) -> list[str]:
        """Every name, sorted."""
        return sorted(self._entries)

    def own(self) -> list[Entry[T]]:
        """Those registered so far that are not Fedkeel's."""
        return [entry for entry in self._entries.values() if entry.is_own]

    def __iter__(self) -> Iterator[Entry[T]]:
        return iter(self._entries[name] for name in self.names())

    def __contains__(self, name: object) -> bool:
        return name in self._entries


REGISTRIES: dict[str, Registry[Any]] = {}  # all there are, by their groups
