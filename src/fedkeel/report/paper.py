"""What goes into a paper: the figures as SVG, PNG or PDF, the tables, and the page as a printout."""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedkeel.core.naming import slug
from fedkeel.drawing.show import as_file, require_converter
from fedkeel.drawing.vega import chart
from fedkeel.errors import FedkeelError, first_line
from fedkeel.files import write_atomically
from fedkeel.report.collect import Collected
from fedkeel.report.figures import figures_of
from fedkeel.report.tuning import search_figures

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


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
            for title, figure in (*figures_of(group), *search_figures(group)):
                name = slug(f"{prefix}{title}".replace(",", "").replace(" ", "-"))
                # Names that differ only in what a file's name cannot hold must not overwrite each other.
                same = sum(path.stem == name or path.stem.rpartition("~")[0] == name for path in written)
                written.append(place / f"{name}{f'~{same + 1}' if same else ''}.{format}")
                written[-1].write_bytes(as_file(chart(figure).whole(), format))
    return written


def require_printer() -> None:
    if importlib.util.find_spec("playwright") is None:
        raise FedkeelError(
            "A printout needs playwright, which is not installed: pip install playwright, then 'playwright install "
            "chromium'; or open the page and print it from your browser."
        )


def write_pdf(page: Path, path: Path) -> Path:
    """The page printed, by Chromium: `page` is what `write` has written.

    No example here, since it needs a browser: `write_pdf(write(["runs/digits"]), Path("report.pdf"))`.
    """
    require_printer()
    from playwright.sync_api import Error, sync_playwright

    if path.is_dir():
        raise FedkeelError(f"'{path}' is a directory: give a file to write with --pdf, like '{path / 'report.pdf'}'.")
    with writing(path, "--pdf"):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with sync_playwright() as engine:
                browser = launched(engine)
                opened = browser.new_page(viewport={"width": 900, "height": 1200}, color_scheme="light")
                opened.goto(page.resolve().as_uri())
                opened.evaluate("drawEverything()")
                opened.pdf(
                    path=str(path), format="A4", margin=dict.fromkeys(("top", "bottom", "left", "right"), "14mm")
                )
                browser.close()
        except Error as error:
            raise FedkeelError(
                f"'{page}' cannot be printed: {first_line(error)}; open it and print it from your browser."
            ) from error
    return path


def launched(engine: Any) -> Any:
    """The Chromium of this machine, or else the one that playwright has installed."""
    found = next(filter(None, map(shutil.which, CHROMIUM)), None)
    return engine.chromium.launch(executable_path=found, args=["--no-sandbox"] if found else [])
