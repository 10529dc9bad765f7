"""A run, or a comparison of several, as one HTML page that anyone can open and pass on.

    from fedkeel import report
    report.write(["runs/demo"])        # -> runs/demo/report.html

The page is one file without a single request; see `page.py`. Figures for a paper are in `figures.py`, which needs
matplotlib, and tables in `fedkeel.runs.tables`.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from fedkeel.errors import FedkeelError
from fedkeel.files import write_atomically
from fedkeel.options import as_path, described
from fedkeel.report.collect import Collected, collect
from fedkeel.report.page import GENERATOR, render
from fedkeel.report.writing import told

__all__ = ["Collected", "collect", "write", "write_tables"]

NAME = "report.html"


def write(directories: Sequence[str | Path], output: str | Path | None = None) -> Path:
    """Write the page and return where it is: in the directory, or `report.html` here for several of them."""
    if isinstance(directories, str | Path) or not isinstance(directories, Sequence):
        raise FedkeelError(f"What to report is {described(directories)}: give a list of directories.")
    directories = [as_path(directory) for directory in directories]
    path = Path(output) if output is not None else default_output(directories)
    refuse_to_overwrite(path)
    collected = collect(directories)
    words = ["fedkeel", "report", *map(str, directories), *(["-o", str(output)] if output is not None else [])]
    page = render(collected, datetime.now(), shlex.join(words))
    with told(path, "-o"):
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder's name that is not Unicode must not cost the page.
        write_atomically(path, page.encode("utf-8", "replace"))
    return path


def default_output(directories: Sequence[str | Path]) -> Path:
    if len(directories) == 1:
        only = Path(directories[0])
        if only.is_dir():
            return only / NAME
    return Path(NAME)


def refuse_to_overwrite(path: Path) -> None:
    """A report may be written over, nothing else."""
    if path.is_dir():
        raise FedkeelError(f"'{path}' is a directory: give a file to write with -o, like '{path / NAME}'.")
    if path.exists() and GENERATOR.encode() not in path.read_bytes()[:4000]:
        raise FedkeelError(f"'{path}' exists and is not a report: choose another file with -o.")


def write_tables(collected: Collected, directory: str | Path) -> list[Path]:
    """The results as Markdown, LaTeX and CSV: `table.md`, `table.tex`, `table.csv`, numbered where data differ."""
    place = Path(directory)
    written = []
    for number, group in enumerate(collected.groups, start=1):
        results = group.results
        if not results.rows:
            continue
        stem = "table" if len(collected.groups) == 1 else f"table-{number}"
        texts = {"md": results.markdown() + "\n", "tex": results.latex(), "csv": results.csv()}
        with told(place, "--tables"):
            place.mkdir(parents=True, exist_ok=True)
            for ending, text in texts.items():
                written.append(place / f"{stem}.{ending}")
                write_atomically(written[-1], text.encode("utf-8", "replace"))
    if not written:
        raise FedkeelError(f"None of the runs in '{collected.directories[0]}' is finished: there is no table yet.")
    return written
