"""How a run is going: live on a terminal and in a notebook, a plain line every tenth of the way elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from io import StringIO
from typing import IO, TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from fedkeel.config import Config, from_one
from fedkeel.core.naming import visible
from fedkeel.core.readable import DASH, duration, percent
from fedkeel.errors import FedkeelError
from fedkeel.observer import Observer, Observers
from fedkeel.options import described

if TYPE_CHECKING:
    from fedkeel.core.evaluation import Scores

WIDE = 1000  # a pipe has no edge: a table there is never cut
PAUSE = 0.2  # seconds between two drawings in a notebook, each of which is a message to the browser


class PlainConsole(Console):
    """Names are data: nothing in a text is markup, and nothing in it reaches the terminal but letters."""

    def render_str(self, text: str, **options: Any) -> Text:  # every text and every cell passes here
        return super().render_str("\n".join(map(visible, text.split("\n"))), **options)


def console(stream: IO[str]) -> Console:
    """A console that keeps tables whole when nobody's terminal limits them."""
    # A notebook claims to be a terminal, and rich would answer every line there with one of HTML.
    claims: dict[str, Any] = {"force_jupyter": False, "force_terminal": False} if notebook() else {}
    width = None if stream.isatty() and not claims else WIDE
    return PlainConsole(file=stream, width=width, highlight=False, markup=False, emoji=False, **claims)


def notebook() -> Any:
    """IPython, where this process is the kernel of a notebook."""
    package = sys.modules.get("IPython")
    return package if package is not None and hasattr(package.get_ipython(), "kernel") else None


def is_shown(verbose: bool | None) -> bool:
    """Whether progress is: as told, or else where a person looks."""
    if verbose is not None and not isinstance(verbose, bool):
        raise FedkeelError(f"'verbose' is {described(verbose)}: give True, False, or nothing for where a person looks.")
    looked_at = notebook() is not None or (sys.stderr is not None and sys.stderr.isatty())
    return looked_at if verbose is None else verbose


@contextmanager
def watched(observer: Observer | None, verbose: bool | None) -> Iterator[Observer]:
    """The observer, and beside it the progress where it is to be shown."""
    if not is_shown(verbose):
        yield observer or Observer()
        return
    with RunProgress() as progress:
        yield progress if observer is None else Observers([observer, progress])


class Display(AbstractContextManager[Any]):
    """Bars on a terminal, lines elsewhere; when quiet, notes alone. How far the work is, is a share of it."""

    def __init__(self, stream: IO[str] | None = None, *, quiet: bool = False) -> None:
        self._notebook = notebook() if stream is None and not quiet else None
        self._console, self._quiet = console(stream or (sys.stdout if self._notebook else sys.stderr)), quiet
        self._live = self._console.is_terminal and not quiet
        label, text = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[text]"))
        # Drawn when something happens, not by a thread: processes are forked meanwhile, and a lock that the thread
        # holds at that moment would stay locked in the child for ever.
        options: dict[str, Any] = {"auto_refresh": False, "transient": True, "disable": not self._live}
        self._bars = Progress(label, BarColumn(bar_width=24), text, console=self._console, **options)
        self._tenths = 0
        self._place: Any = None  # in the notebook
        self._drawn = -math.inf
        self._live = self._live or self._notebook is not None

    def __exit__(self, *exception: object) -> None:
        self._bars.stop()
        if self._bars.tasks:
            self._drawn = -math.inf
            self.draw()

    def draw(self) -> None:
        """The bars as they are now, in the place where they were."""
        self._bars.refresh()
        if self._notebook is None or time.monotonic() < self._drawn + PAUSE:
            return
        page = StringIO()
        console(page).print(self._bars.get_renderable())
        content = {"text/plain": page.getvalue().rstrip()}
        if self._place is None:
            self._place = self._notebook.display.display(content, raw=True, display_id=True)
        else:
            self._place.update(content, raw=True)
        self._drawn = time.monotonic()

    def note(self, text: str) -> None:
        self._console.print(f"fedkeel: {text}")

    def say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(text)

    def start(self, first: float) -> None:
        """The work begins at this share, e.g. when a run is resumed."""
        self._began, self._first = time.monotonic(), first
        self._bars.start()

    def time_left(self, share: float) -> str:
        if share <= self._first:
            return "-:--"
        return duration((time.monotonic() - self._began) * (1 - share) / (share - self._first))

    def reaches_tenth(self, share: float) -> bool:
        """Every tenth of the way, once."""
        before, self._tenths = self._tenths, max(self._tenths, int(share * 10 + 1e-9))
        return self._tenths > before


class RunProgress(Display, Observer):
    """The progress of one run."""

    def started(self, config: Config, first_round: int) -> None:
        self._rounds, self._accuracy = config.rounds, "-"
        self.start(first_round / config.rounds)
        self._task = self._bars.add_task(visible(config.method), total=config.rounds, text="")
        self._draw(first_round)

    def client_done(self, round: int, done: int, total: int) -> None:
        self._draw(round + done / total)

    def round_done(self, round: int, rounds: int, scores: Scores | None, loss: float) -> None:
        if scores is not None:
            self._accuracy = f"{percent(scores.average)} %"
        self._draw(round + 1)
        share = (round + 1) / rounds
        if not self._live and self.reaches_tenth(share):
            known = f"accuracy {self._accuracy}  loss {f'{loss:.3f}' if math.isfinite(loss) else DASH}"
            self.say(f"round {from_one(round)}/{rounds}  {known}  left {self.time_left(share)}")

    def _draw(self, rounds_done: float) -> None:
        left = self.time_left(rounds_done / self._rounds)
        text = f"{of_rounds(rounds_done, self._rounds)}  accuracy {self._accuracy}  left {left}"
        self._bars.update(self._task, completed=rounds_done, text=text)
        self.draw()


def of_rounds(rounds_done: float, rounds: int) -> str:
    return f"round {min(from_one(int(rounds_done)), rounds)}/{rounds}"
