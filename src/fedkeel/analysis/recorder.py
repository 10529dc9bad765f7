"""Diagnostics while a run trains: an observer that measures at chosen rounds and keeps the files up to date.

Nothing of the run depends on it. What was measured stands in `diagnostics/NAME.jsonl`, a line per round, from which
`diagnostics/NAME.json` is made anew each time; a resumed run drops the lines of the rounds that it does again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from fedkeel import spec
from fedkeel.analysis.diagnostic import Diagnostic, Measured, build, recorded, records_file
from fedkeel.analysis.moment import of_round, own_worker
from fedkeel.config import Config
from fedkeel.durable import explained, write_atomically
from fedkeel.engine.local import Worker
from fedkeel.engine.setup import Setup
from fedkeel.errors import FedkeelError
from fedkeel.observer import Aggregated, Observer
from fedkeel.store import plain


def chosen(config: Config) -> list[Diagnostic]:
    """The diagnostics that `record` names, each of which must work while training."""
    diagnostics: list[Diagnostic] = []
    for text in spec.split(config.record, ",") if config.record.strip() else []:
        if not text.strip():
            raise FedkeelError(f"'record' is '{config.record}', which has an empty part: give names, with commas.")
        diagnostic = build(text)
        if diagnostic.when == "after":
            raise FedkeelError(
                f"'{diagnostic.name}' is made from a run that is there, not recorded: "
                f"use 'fedkeel analyse {diagnostic.name} DIR' afterwards."
            )
        if diagnostic.name in [other.name for other in diagnostics]:
            raise FedkeelError(f"'record' names '{diagnostic.name}' twice: keep one.")
        diagnostics.append(diagnostic)
    return diagnostics


def is_recorded(config: Config) -> Callable[[int], bool]:
    """Which rounds are: the first, every so many, and the last."""
    return lambda round: round % config.record_every == 0 or round == config.rounds - 1


class Recorder(Observer):
    """Measures the diagnostics at the rounds that are due."""

    def __init__(
        self,
        diagnostics: Sequence[Diagnostic],
        directory: Path,
        setup: Setup,
        note: Callable[[str], None],
    ) -> None:
        worker = setup.worker
        self._diagnostics, self._directory, self._setup, self._note = list(diagnostics), directory, setup, note
        self._due = is_recorded(setup.config)
        self._own: Worker | None = None
        self._measured: dict[str, list[Measured]] = {}
        watches = [watch for diagnostic in diagnostics if (watch := diagnostic.watch(self._due)) is not None]
        for watch in watches:
            worker.watch_steps(watch)

    def started(self, config: Config, first_round: int) -> None:
        for diagnostic in self._diagnostics:
            path = records_file(self._directory, diagnostic.name)
            earlier = [entry for entry in recorded(self._directory, diagnostic.name) if entry.round < first_round]
            with explained(path):
                path.parent.mkdir(exist_ok=True)
                write_atomically(path, b"".join(map(_line, earlier)))
            self._measured[diagnostic.name] = earlier

    def aggregated(self, state: Aggregated) -> None:
        if not self._due(state.sent.round):
            return
        self._own = self._own or own_worker(self._setup.worker)
        moment = of_round(state, self._own, self._setup.held_out)
        for diagnostic in self._diagnostics:
            try:
                entry = Measured(moment.round, plain(diagnostic.measure(moment)))
            except FedkeelError as error:  # the run is worth more than this look at it
                self._note(f"Round {moment.round} has no record of '{diagnostic.name}': {error}")
                continue
            self._measured[diagnostic.name].append(entry)
            path = records_file(self._directory, diagnostic.name)
            with explained(path), open(path, "ab") as file:
                file.write(_line(entry))
            figures = diagnostic.figures(self._measured[diagnostic.name])
            diagnostic.write(self._directory, diagnostic.document(figures))

    def note(self, text: str) -> None:
        """Notes are for people."""


def _line(entry: Measured) -> bytes:
    return json.dumps({"round": entry.round, "values": entry.values}).encode() + b"\n"
