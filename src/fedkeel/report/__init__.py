"""A run, or a comparison of several, as one HTML page that anyone can open and pass on.

    from fedkeel import report
    report.write(["runs/demo"])        # -> runs/demo/report.html

The page is one file without a single request; see `page.py`. Figures for a paper are in `figures.py`, which needs
matplotlib, and tables in `fedkeel.experiments.tables`.
"""

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from fedkeel.errors import FedkeelError
from fedkeel.files import write_atomically
from fedkeel.options import as_path, described
from fedkeel.report.collect import Collected, collect
from fedkeel.report.page import GENERATOR, render

__all__ = ["Collected", "collect", "write", "write_tables"]

NAME = "report.html"


def write(directories: Sequence[str | Path], output: str | Path | None = None, *, metric: str = "accuracy") -> Path:
    """Write the page and return where it is: in the directory, or `report.html` here for several of them. `metric` is
    what its table of results is of; curves and bars are of accuracy."""
    if isinstance(directories, str | Path) or not isinstance(directories, Sequence):
        raise FedkeelError(f"What to report is {described(directories)}: give a list of directories.")
    places = [as_path(directory) for directory in directories]
    here = places[0] if len(places) == 1 and places[0].is_dir() else Path()
    path = Path(output) if output is not None else here / NAME
    if path.is_dir():
        raise FedkeelError(f"'{path}' is a directory: give a file to write with -o, like '{path / NAME}'.")
    if path.exists() and GENERATOR.encode() not in path.read_bytes()[:4000]:  # a report may be written over
        raise FedkeelError(f"'{path}' exists and is not a report: choose another file with -o.")
    words = ["fedkeel", "report", *map(str, places), *(["-o", str(output)] if output is not None else [])]
    words += ["--metric", metric] if metric != "accuracy" else []
    page = render(collect(places, metric=metric), datetime.now(), shlex.join(words))
    with writing(path, "-o"):
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder's name that is not Unicode must not cost the page.
        write_atomically(path, page.encode("utf-8", "replace"))
    return path


def write_tables(collected: Collected, directory: str | Path) -> list[Path]:
    """The results as Markdown, LaTeX and CSV: `table.md`, `table.tex`, `table.csv`, numbered where data differ."""
    place = Path(directory)
    written = []
    for number, group in enumerate(collected.groups, start=1):
        results = group.table
        if not results.rows:
            continue
        stem = "table" if len(collected.groups) == 1 else f"table-{number}"
        texts = {"md": results.markdown() + "\n", "tex": results.latex(), "csv": results.csv()}
        with writing(place, "--tables"):
            place.mkdir(parents=True, exist_ok=True)
            for ending, text in texts.items():
                written.append(place / f"{stem}.{ending}")
                write_atomically(written[-1], text.encode("utf-8", "replace"))
    if not written:
        raise FedkeelError(f"None of the runs in '{collected.directories[0]}' is finished: there is no table yet.")
    return written


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """What keeps a file from being written, in one sentence; `option` is the flag that names another place."""
    try:
        yield
    except OSError as error:
        problem = error.strerror or error
        raise FedkeelError(f"'{path}' cannot be written: {problem}; choose another place with {option}.") from error
