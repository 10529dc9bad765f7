"""A run, or a comparison of several, as one HTML page that anyone can open and pass on.

from fedkeel import report
report.write(["runs/demo"])        # -> runs/demo/report.html
"""

import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from fedkeel.errors import FedkeelError
from fedkeel.files import write_atomically
from fedkeel.options import as_path, described
from fedkeel.report.collect import collect
from fedkeel.report.page import GENERATOR, render
from fedkeel.report.paper import write_figures, write_tables, writing

__all__ = ["collect", "write", "write_figures", "write_tables"]

NAME = "report.html"


def write(directories: Sequence[str | Path], output: str | Path | None = None, *, metric: str = "accuracy") -> Path:
    """Write the page and return where it is: in the directory, or `report.html` here for several of them.

    Args:
        directories: of runs, or folders that hold them.
        output: another place for the page.
        metric: what its table of results is of; curves and bars are of accuracy.

    >>> run = fedkeel.simulate(rounds=1, subsample=30, directory="runs/digits")
    >>> write(["runs/digits"]).name
    'report.html'
    """
    if isinstance(directories, str | Path) or not isinstance(directories, Sequence):
        raise FedkeelError(f"What to report is {described(directories)}: give a list of directories.")
    places = [as_path(directory) for directory in directories]
    here = places[0] if len(places) == 1 and places[0].is_dir() else Path()
    path = Path(output) if output is not None else here / NAME
    if path.is_dir() or (path.exists() and GENERATOR.encode() not in path.read_bytes()[:4000]):
        raise FedkeelError(f"'{path}' exists and is not a report: choose another file with -o.")
    page = render(collect(places, metric=metric), datetime.now(), shlex.join(["fedkeel", "report", *map(str, places)]))
    with writing(path, "-o"):
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder's name that is not Unicode must not cost the page.
        write_atomically(path, page.encode("utf-8", "replace"))
    return path
