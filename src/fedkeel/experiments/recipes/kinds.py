"""Which kind each entry of a recipe must be, so that a slip in a TOML file of one's own is told in a sentence."""

from collections.abc import Callable, Mapping
from typing import Any

Kind = tuple[Callable[[Any], bool], str]  # whether a value is of it, and how to write it


def list_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(isinstance(entry, kind) for entry in value)


def table_of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(isinstance(entry, kind) for entry in value.values())


def seeds(value: Any) -> bool:
    return list_of(int)(value) and bool(value) and min(value) >= 0 and len(set(value)) == len(value)


TEXT: Kind = (lambda value: isinstance(value, str), "text, in quotes")
TEXTS: Kind = (list_of(str), "a list of texts, in quotes")
TABLES: Kind = (list_of(dict), "a list of tables, { label = ... }")

ENTRIES: Mapping[str, Kind] = {
    **dict.fromkeys(("like", "paper", "table", "caption", "measure", "protocol", "substitute"), TEXT),
    **dict.fromkeys(("order", "reference"), TEXT),
    **dict.fromkeys(("decisions", "misprints", "claims", "diagnostics"), TEXTS),
    **dict.fromkeys(("columns", "rows"), TABLES),
    "seeds": (seeds, "a list of different whole numbers, like [0, 1, 2]"),
    "base": (table_of(object), "a table of options"),
    "groups": (table_of(dict), "a table of options for each group"),
    "published": (table_of(str), "a line of text for each row"),
}
COLUMN: Mapping[str, Kind] = {
    **dict.fromkeys(("label", "group", "relative_to"), TEXT),
    "average": (lambda value: isinstance(value, bool), "true or false"),
}
ROW: Mapping[str, Kind] = {"label": TEXT, "on": (table_of(dict), "a table of options for each group or column")}
