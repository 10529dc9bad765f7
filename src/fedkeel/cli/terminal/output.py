"""Results on stdout: lines and tables for a person, or one JSON document for a script."""

import json
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fedkeel.core.readable import duration as duration

if TYPE_CHECKING:
    from rich.text import Text

    from fedkeel.experiments.tables import Results


class Table(NamedTuple):
    """A table of anything."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str | None = None


Line: TypeAlias = "str | Table | Results | Text"


def show(lines: Iterable[Line], document: Any = None, *, as_json: bool = False, soft_wrap: bool = False) -> None:
    """Print the lines, or the document instead. With `soft_wrap` a text is left to the terminal to break."""
    if as_json:
        print(json.dumps(document, indent=1))
        return
    from fedkeel.cli.terminal.console import console, drawn  # rich takes half as long as all of a `--help`

    out = console(sys.stdout)
    for line in lines:
        out.print(drawn(line), soft_wrap=soft_wrap and not isinstance(line, Table))
