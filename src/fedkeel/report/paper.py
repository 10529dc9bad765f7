"""What goes into a paper: the figures as SVG, PNG or PDF, and the tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedkeel.core.naming import slug
from fedkeel.drawing.show import as_file, require_converter
from fedkeel.drawing.vega import chart
from fedkeel.errors import FedkeelError
from fedkeel.files import write_atomically
from fedkeel.report.collect import Collected
from fedkeel.report.figures import figures_of


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """What keeps a file from being written, in one sentence; `option` is the flag that names another place."""
    try:
        yield
    except OSError as error:
        problem = error.strerror or error
        raise FedkeelError(f"'{path}' cannot be written: {problem}; choose another place with {option}.") from error


def write_tables(collected: Collected, directory: str | Path) -> list[Path]:
    """The results as Markdown, LaTeX and CSV: `table.md`, `table.tex`, `table.csv`, numbered where data differ.

    >>> run = fedkeel.simulate(rounds=1, subsample=30, directory="runs/digits")
    >>> [path.name for path in write_tables(fedkeel.report.collect(["runs/digits"]), "tables")]
    ['table.md', 'table.tex', 'table.csv']
    """
    place, texts = Path(directory), dict[Path, str]()
    for number, results in enumerate((group.table for group in collected.groups), start=1):
        stem = "table" if len(collected.groups) == 1 else f"table-{number}"
        kinds = {"md": results.markdown() + "\n", "tex": results.latex(), "csv": results.csv()} if results.rows else {}
        texts |= {place / f"{stem}.{ending}": text for ending, text in kinds.items()}
    if not texts:
        raise FedkeelError(f"None of the runs in '{collected.directories[0]}' is finished: there is no table yet.")
    with writing(place, "--tables"):
        place.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            write_atomically(path, text.encode("utf-8", "replace"))
    return [*texts]


def write_figures(collected: Collected, directory: str | Path, format: str = "svg") -> list[Path]:
    """Every figure as a file of its own; returns their paths. `format` is svg, png or pdf.

    No example here, since it needs `fedkeel[report]`: `write_figures(collect(["runs/digits"]), "figures", "pdf")`.
    """
    require_converter()
    place, written = Path(directory), list[Path]()
    with writing(place, "--figures"):
        place.mkdir(parents=True, exist_ok=True)
        for number, group in enumerate(collected.groups, start=1):
            prefix = "" if len(collected.groups) == 1 else f"data{number}-"
            for title, figure in figures_of(group):
                name = slug(f"{prefix}{title}".replace(",", "").replace(" ", "-"))
                # Names that differ only in what a file's name cannot hold must not overwrite each other.
                same = sum(path.stem == name or path.stem.rpartition("~")[0] == name for path in written)
                written.append(place / f"{name}{f'~{same + 1}' if same else ''}.{format}")
                written[-1].write_bytes(as_file(chart(figure), format))
    return written
