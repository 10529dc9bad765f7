"""Names with options, as people type them: `fedprox(mu=0.1)+greg`, `dirichlet(alpha=0.3, clients=10)`.

Methods, models, data sets, partitions and transforms are all given this way, on the command line, in
`config.toml` and in Python.
"""

import ast
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from fedkeel.errors import FedkeelError
from fedkeel.options import described

_NAME = re.compile(r"[A-Za-z0-9_][\w./:-]*")


@dataclass(frozen=True)
class Spec:
    """A registered name and the options to build it with."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.options:
            return self.name
        return f"{self.name}({', '.join(f'{k}={v!r}' for k, v in self.options.items())})"


def parse(text: str) -> Spec:
    """Parse one name with options. Values are Python literals, `true`/`false`, or plain words.

    >>> parse("folder(root=./images, size=64)")
    Spec(name='folder', options={'root': './images', 'size': 64})
    """
    if not isinstance(text, str):
        raise FedkeelError(
            f"A name is {described(text)}, which is not text: write 'name(option=value)', and join names by '+'."
        )
    text = text.strip()
    name, bracket, rest = text.partition("(")
    name = name.strip()
    if not _NAME.fullmatch(name):
        raise FedkeelError(f"'{text}' is not a name with options: write it like 'name' or 'name(option=value)'.")
    if bracket and not rest.endswith(")"):
        raise FedkeelError(f"'{text}' lacks its closing bracket: write it like 'name(option=value)'.")
    options: dict[str, Any] = {}
    for item in filter(str.strip, split(rest[:-1], ",")):
        key, equals, value = item.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key.isidentifier():
            raise FedkeelError(f"'{item.strip()}' in '{text}' is not an option: write it like 'option=value'.")
        if key in options:
            raise FedkeelError(f"'{text}' gives the option '{key}' twice: keep one.")
        options[key] = literal(value.strip())
    return Spec(name, options)


def parse_sum(text: str) -> list[Spec]:
    """Parse a composition: names with options joined by `+`.

    >>> [str(s) for s in parse_sum("fedprox(mu=0.1)+greg")]
    ['fedprox(mu=0.1)', 'greg']
    """
    return [parse(part) for part in split(text, "+")] if isinstance(text, str) else [parse(text)]


def split(text: str, separator: str) -> list[str]:
    """Split at `separator` outside of brackets and quotes."""
    parts, depth, quote, escaped, start = [], 0, "", False, 0
    for position, character in enumerate(text):
        if escaped:
            escaped = False
        elif quote:
            escaped = character == "\\"
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == separator and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]


def literal(text: str) -> Any:
    """A value as people type it: a Python literal, `true`, `false` or `none`, else the text itself.

    >>> literal("0.1"), literal("true"), literal("cosine")
    (0.1, True, 'cosine')
    """
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    if text.lower() == "none":
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pattern's '\d', which is meant as it is
            return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: nested beyond what Python reads
        return text


def names(given: Any) -> list[str]:
    """Names from a list, or from text as in `unseen=sketch` and `unseen=[art, sketch]`; each once.

    >>> names("[art, sketch]"), names(3)
    (['art', 'sketch'], ['3'])
    """
    if not isinstance(given, str | Iterable):
        given = str(given)
    parts = given.strip("[]() ").split(",") if isinstance(given, str) else [str(name) for name in given]
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))
