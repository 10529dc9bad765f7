"""What an option may be, said once: `rounds: Annotated[int, Range(1)]`, `mode: Literal["mean", "median"]`.

`Config`, a site's policy, methods, models, data sets, partitions, transforms, diagnostics and robust rules declare
their options so, in the signature or the dataclass that takes them; here values are held against it.
"""

import inspect
import os
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from math import inf, isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fedkeel.errors import FedkeelError, nearest

LONGEST = 60
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class Range:
    """The limits of a number: `Range(0, 1)` has both ends in it, `Range(above=0, below=1)` neither.

    >>> Range(above=0, most=1).wanted, Range(0, below=1).wanted, Range(1).wanted
    ('give a number above 0 and at most 1.', 'give a number from 0, below 1.', 'give at least 1.')
    """

    least: float = -inf
    most: float = inf
    above: float = -inf
    below: float = inf

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    @property
    def wanted(self) -> str:
        """The end of the sentence that refuses a number."""
        if not isfinite(self.most) and not isfinite(self.below):
            return f"give at least {self.least:g}." if isfinite(self.least) else f"give a number above {self.above:g}."
        start = f"from {self.least:g}" if isfinite(self.least) else f"above {self.above:g}"
        end = f" to {self.most:g}" if isfinite(self.least) else f" and at most {self.most:g}"
        return f"give a number {start}{end if isfinite(self.most) else f', below {self.below:g}'}."


class Only:
    """Beside the hint of an option in brackets: it has an effect with these values of another one alone.

    `lambda_: Annotated[Share, Only("mode", "mix")] = 0.5`
    """

    def __init__(self, option: str, *values: Any) -> None:
        self.option, self.values = option, values


@dataclass(frozen=True)
class Needs:
    """What an option has no effect without: a condition on what a run comes to, and in words where it does not hold."""

    holds: Callable[[Any], object]
    otherwise: str

    def refusal(self, name: str) -> str:
        return f"'{name}' does nothing {self.otherwise}: change that, or leave it out."


# -- the kinds of numbers --------------------------------------------------------------------------------------------
Positive = Annotated[float, Range(above=0)]
NotNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(above=0, most=1)]
Decay = Annotated[float, Range(0, below=1)]  # the share of the old that is kept
Count = Annotated[int, Range(1)]
Number = Annotated[int, Range(0)]


def checked(value: Any, hint: Any, subject: str) -> Any:
    """The value of an option, a whole number for a float as a float, if it is what the hint says; `subject` begins the
    sentence that refuses it. What a hint says in other words than those here is for its owner to check."""
    kind, *limits = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    given = value
    if get_origin(kind) in (Union, types.UnionType):
        return _one_of(value, get_args(kind), subject)
    if get_origin(kind) is Literal:
        value = "none" if value is None and "none" in get_args(kind) else value  # as it is read in brackets
        if not isinstance(value, str) or value not in get_args(kind):
            raise FedkeelError(f"{subject} is {described(value)}: {nearest(str(value), get_args(kind))}")
        return value
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 2**1000 else inf
    if kind in KINDS and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        wanted = next((f": {limit.wanted}" for limit in limits if isinstance(limit, Range)), ".")
        raise FedkeelError(f"{subject} is {described(value)}, which is not {KINDS[kind]}{wanted}")
    parts = get_args(kind) if get_origin(kind) is tuple else ()
    if parts and all({int, float} & {part, *get_args(part)} for part in parts):
        several = isinstance(value, tuple | list) and len(value) == len(parts)
        if not several or not all(isinstance(number, int | float) for number in value):
            raise FedkeelError(f"{subject} is {described(value)}: give {len(parts)} numbers in brackets.")
    if kind is str and any("\ud800" <= character <= "\udfff" for character in value):
        raise FedkeelError(f"{subject} is {value!r}, which is not valid Unicode: rename what it names.")
    if kind is float and not isfinite(value):
        raise FedkeelError(f"{subject} is {value}: give a finite number.")
    for limit in limits:
        if isinstance(limit, Range) and value not in limit:
            raise FedkeelError(f"{subject} is {given}: {limit.wanted}")
    return value


def _one_of(value: Any, hints: tuple[Any, ...], subject: str) -> Any:
    """`float | None`, `bool | Literal["auto"]`: what one of them takes."""
    if value is None and type(None) in hints:
        return None
    hints = tuple(hint for hint in hints if hint is not type(None))
    for hint in hints:
        try:
            return checked(value, hint, subject)
        except FedkeelError:
            if len(hints) == 1:
                raise
    words = [word for hint in hints for word in get_args(hint) or ("true", "false") if hint is bool or get_args(hint)]
    raise FedkeelError(f"{subject} is {described(value)}: give {', '.join(words[:-1])} or {words[-1]}.")


def refuse_beside(hints: Mapping[str, Any], given: Collection[str], values: Mapping[str, Any], owner: str) -> None:
    """Of the options `given`, one that does nothing with these values of the others: see `Only`."""
    for name in (name for name in given if values[name] != "none"):  # which says how it is
        for only in (limit for limit in get_args(hints.get(name))[1:] if isinstance(limit, Only)):
            if values[only.option] not in only.values:
                wanted, now = [f"{only.option}={str(value).lower()}" for value in (only.values[0], values[only.option])]
                raise FedkeelError(f"The '{name}' of {owner} does nothing with {now}: give {wanted}, or leave it out.")


@lru_cache(maxsize=1024)
def hints_of(build: Any) -> Mapping[str, Any]:
    """The hint of every option that a function or a class takes; none where they name what only type checkers know."""
    takes = build if is_dataclass(build) or not inspect.isclass(build) else build.__init__
    try:
        hints = get_type_hints(takes, include_extras=True)
    except NameError:
        return {}
    return {name: hints[name] for name in inspect.signature(build).parameters if name in hints}


def check_fields(thing: Any, subject: str = "'{}'") -> None:
    """Hold every field of a dataclass against its hint, in place; `subject` has the field's name put in."""
    for name, hint in hints_of(type(thing)).items():  # type: ignore[arg-type]
        object.__setattr__(thing, name, checked(getattr(thing, name), hint, subject.format(name)))


def idle(thing: Any, facts: Any, typed: Collection[str] = ()) -> dict[str, str]:
    """The options that are set and have no effect, each with the sentence that refuses it: what they need, declared in
    their fields' metadata, does not hold of `facts`. One that is at its default is not set, unless it was `typed`."""
    return {
        entry.name: needs.refusal(entry.name)
        for entry in fields(thing)
        if (needs := entry.metadata.get("needs"))
        and (getattr(thing, entry.name) != entry.default or entry.name in typed)
        if not needs.holds(facts)
    }


def described(thing: Any) -> str:
    """A few words for anything: a Federation printed in full would be a page of numbers.

    >>> described("fedavg"), described([1, 2]), described(dict), described(Path)
    ("'fedavg'", '[1, 2]', 'the class dict', 'the class Path')
    """
    if isinstance(thing, type):
        return f"the class {thing.__name__}"
    parts = thing if isinstance(thing, list | tuple | set) else [thing]
    is_plain = all(part is None or isinstance(part, bool | int | float | str | bytes | dict) for part in parts)
    if is_plain and len(text := repr(thing)) <= LONGEST and " object at 0x" not in text:
        return text
    kind = type(thing).__name__
    return f"{'an' if kind[0] in 'AEIOUaeiou' else 'a'} {kind}"


def as_path(given: Any, what: str = "directory") -> Path:
    """A path that the system can be asked about."""
    if not isinstance(given, str | os.PathLike) or "\0" in os.fspath(given):
        raise FedkeelError(f"'{what}' is {described(given)}: give a path.")
    return Path(given)
