"""What a run does at this moment, in a file of its own: who trains, and what was noted. For whoever watches it."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeel.observer import Observer

if TYPE_CHECKING:
    from fedkeel.config import Config
    from fedkeel.core.evaluation import Scores

FILE = "live.json"
STOPPED = "it was stopped"
SHARE = 0.01  # of the time that may go into writing it
MOST_NOTES, MOST_NAMED = 100, 50
TYPES: tuple[tuple[str, type], ...] = (("ended", str), ("round", int))


class Live(Observer):
    """Keeps the file. It is there to be looked at: nothing depends on it, and a run does not end for want of it.

    Attributes:
        then: the observer that is told too; notes go there from here.
        state: this process, why it ended, the round (from 0; None before the first), how many of its clients are done,
            those who train, the notes.
    """

    def __init__(self, directory: Path, then: Observer) -> None:
        self.then, self._path = then, directory / FILE
        self._took, self._written = 0.0, -float("inf")
        before = read(directory)
        self.state: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "ended": None}
        self.state |= {"round": None, "done": 0, "clients": 0, "training": [], "notes": before.get("notes", [])}
        self._write()

    def started(self, config: Config, first_round: int) -> None:  # noqa: ARG002
        self._set(round=first_round)

    def training(self, clients: Sequence[str]) -> None:
        self._set(training=[*clients[:MOST_NAMED]])

    def client_done(self, round: int, done: int, total: int) -> None:
        self._set(round=round, done=done, clients=total)

    def round_done(self, round: int, rounds: int, scores: Scores | None, loss: float) -> None:  # noqa: ARG002
        self._set(round=round + 1, done=0, training=[])

    def note(self, text: str) -> None:
        notes = [*self.state["notes"], {"at": time.time(), "text": text}][-MOST_NOTES:]
        self.state["notes"] = notes
        self._write()
        self.then.note(text)

    def end(self, reason: str) -> None:
        """The process goes on to something else; empty when the run is finished."""
        self.state |= {"ended": reason, "training": []}
        self._write()

    def _set(self, **what: Any) -> None:
        self.state |= what
        if time.monotonic() - self._written >= self._took / SHARE:
            self._write()

    def _write(self) -> None:
        began, aside = time.monotonic(), self._path.with_suffix(".writing")
        with suppress(OSError):  # a full disk is told of by what the run needs
            aside.write_text(json.dumps({**self.state, "at": time.time()}))
            os.replace(aside, self._path)
        self._written = time.monotonic()
        self._took = self._written - began


def read(directory: Path) -> dict[str, Any]:
    """What the file says; nothing where there is none, as in a directory of an earlier version, or another's."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((directory / FILE).read_bytes())
        notes = [{"at": float(note["at"]), "text": str(note["text"])} for note in found["notes"]]
        numbers = {name: int(found[name] or 0) for name in ("pid", "done", "clients")}
        ended, round = (found[name] if found[name] is None else kind(found[name]) for name, kind in TYPES)
        names = {"host": str(found["host"]), "training": [*map(str, found["training"])], "ended": ended}
        return {**numbers, **names, "round": round, "at": float(found["at"]), "notes": notes}
    return {}


def is_running(found: dict[str, Any]) -> bool:
    """Whether the process that wrote this is at it; of another machine's that cannot be known, and is believed."""
    if not found or found["ended"] is not None:
        return False
    try:
        if found["host"] == socket.gethostname() and found["pid"] > 0:  # others than one process have other numbers
            os.kill(found["pid"], 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's process is one
    return True
