"""What a run does at this moment, in a file of its own: how far it is, and what was noted. For whoever watches it."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedkeel.files import parsed, write_to_show
from fedkeel.observer import Observer

if TYPE_CHECKING:
    from fedkeel.config import Config
    from fedkeel.core.evaluation import Scores

FILE = "live.json"
STOPPED = "stopped"  # and nobody knows why
SHARE, BURST = 0.01, 0.05  # of the time that may go into writing it; seconds that may go before that counts
SLOW = 0.005  # seconds that a single writing counts at most
MOST_NOTES = 100


class Live(Observer):
    """Keeps the file. It is there to be looked at: nothing depends on it, and a run does not end for want of it.

    Attributes:
        then: the observer that is told too; notes go there from here.
        state: this process, why it ended, the round (from 0; None before the first), how many of its clients are done,
            over a network what each site last did, the notes.
    """

    def __init__(self, directory: Path, then: Observer) -> None:
        self.then, self._path = then, directory / FILE
        self._began, self._spent = time.monotonic(), 0.0
        before = read(directory)
        self.state: dict[str, Any] = {"pid": os.getpid(), "host": socket.gethostname(), "ended": None}
        self.state |= {"round": None, "done": 0, "clients": 0, "sites": {}, "notes": before.get("notes", [])}
        self._write()

    def started(self, config: Config, first_round: int) -> None:
        self.set(round=first_round)

    def client_done(self, round: int, done: int, total: int) -> None:
        self.set(round=round, done=done, clients=total)

    def round_done(self, round: int, rounds: int, scores: Scores | None, loss: float) -> None:
        self.set(round=round + 1, done=0)

    def note(self, text: str) -> None:
        notes = [*self.state["notes"], {"at": time.time(), "text": text}][-MOST_NOTES:]
        self.state["notes"] = notes
        self._write()
        self.then.note(text)

    def end(self, reason: str) -> None:
        """The process goes on to something else; empty when the run is finished."""
        self.state["ended"] = reason
        self._write()

    def set(self, **what: Any) -> None:
        self.state |= what
        if self._spent <= SHARE * (time.monotonic() - self._began) + BURST:
            self._write()

    def _write(self) -> None:
        began = time.monotonic()
        write_to_show(self._path, json.dumps({**self.state, "at": time.time()}).encode())
        self._spent += min(time.monotonic() - began, SLOW)  # a machine that was busy for once says nothing of the next


def read(directory: Path) -> dict[str, Any]:
    """What the file says; nothing where there is none, as in a directory of an earlier version, or another's."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        found = parsed((directory / FILE).read_bytes())
        notes = [{"at": float(note["at"]), "text": str(note["text"])} for note in found["notes"]]
        numbers = {name: int(found[name]) for name in ("pid", "done", "clients", "at")}
        sites = {name: {**site, "state": str(site["state"])} for name, site in found.get("sites", {}).items()}
        texts = {"host": str(found["host"]), "notes": notes, "sites": sites}
        round, ended = found["round"], found["ended"]
        return numbers | texts | {"round": round and int(round), "ended": None if ended is None else str(ended)}
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
