"""A run, or a comparison of several, as one HTML page that anyone can open and pass on.

    from fedkeel import report
    report.write(["runs/demo"])        # -> runs/demo/report.html

The page is one file without a single request; see `page.py`. Figures and tables for a paper are in `paper.py`, which
needs vl-convert for the figures and Chromium for a printout.
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
from fedkeel.report.paper import write_figures, write_pdf, write_tables, writing

__all__ = ["collect", "write", "write_figures", "write_pdf", "write_tables"]

NAME = "report.html"
MOST_IMAGES = 50


def write(
    directories: Sequence[str | Path],
    output: str | Path | None = None,
    *,
    metric: str = "accuracy",
    images: int = 0,
) -> Path:
    """Write the page and return where it is: in the directory, or `report.html` here for several of them.

    Args:
        directories: of runs, or folders that hold them.
        output: another place for the page.
        metric: what its table of results is of; curves and bars are of accuracy.
        images: of each site so many test images that the best model has right and wrong. Whoever gets the page sees
            them, which is not always right.

    >>> run = fedkeel.simulate(rounds=1, subsample=30, directory="runs/digits")
    >>> write(["runs/digits"]).name
    'report.html'
    """
    if isinstance(images, bool) or not isinstance(images, int) or not 0 <= images <= MOST_IMAGES:
        raise FedkeelError(f"'images' is {described(images)}: give a number from 0 to {MOST_IMAGES}, of each site.")
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
    words += ["--images", str(images)] if images else []
    page = render(collect(places, metric=metric), datetime.now(), shlex.join(words), images)
    with writing(path, "-o"):
        path.parent.mkdir(parents=True, exist_ok=True)
        # A folder's name that is not Unicode must not cost the page.
        write_atomically(path, page.encode("utf-8", "replace"))
    return path
