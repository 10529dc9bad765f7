"""Diagnostics while a run trains: an observer that measures at chosen rounds and keeps the files up to date.

Nothing of the run depends on it. What was measured stands in `diagnostics/NAME.jsonl`, a line per round, from which
`diagnostics/NAME.json` is made anew each time; a resumed run drops the lines of the rounds that it does again.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from fedkeel import spec
from fedkeel.analysis.diagnostic import Diagnostic, Measured, build, recorded, records_file
from fedkeel.analysis.snapshot import Objects, of_round, own_worker
from fedkeel.config import Config, from_one
from fedkeel.core.evaluation import Scores
from fedkeel.engine.local import Worker
from fedkeel.engine.setup import Setup
from fedkeel.errors import FedkeelError
from fedkeel.files import explained, write_atomically
from fedkeel.observer import Aggregated, Observer
from fedkeel.runs.run import PYTHON_OBJECT, Run


def requested(config: Config) -> list[Diagnostic]:
    """The diagnostics that `record` names.

    >>> [diagnostic.name for diagnostic in requested(Config(record="loss-gap, tsne(samples=500)"))]
    ['loss-gap', 'tsne']
    """
    diagnostics: list[Diagnostic] = []
    for text in spec.split(config.record, ",") if config.record.strip() else []:
        if not text.strip():
            raise FedkeelError(f"'record' is '{config.record}', which has an empty part: give names, with commas.")
        diagnostic = build(text)
        if diagnostic.name in [other.name for other in diagnostics]:
            raise FedkeelError(f"'record' names '{diagnostic.name}' twice: keep one.")
        diagnostics.append(diagnostic)
    return diagnostics


def is_recorded(config: Config) -> Callable[[int], bool]:
    """Which rounds are: the first, every so many, and the last."""
    return lambda round: round % config.record_every == 0 or round == config.rounds - 1


class Recorder(Observer):
    """Measures the diagnostics at the rounds that are due. No example: the option `record` of a run makes it."""

    def __init__(
        self, diagnostics: Sequence[Diagnostic], directory: Path, setup: Setup, note: Callable[[str], None]
    ) -> None:
        self._diagnostics = [diagnostic for diagnostic in diagnostics if not diagnostic.of_records]
        self._of_records = [diagnostic for diagnostic in diagnostics if diagnostic.of_records]
        self._directory, self._setup, self._note = directory, setup, note
        self._due = is_recorded(setup.config)
        self._own: Worker | None = None
        self._measured: dict[str, list[Measured]] = {}
        for diagnostic in diagnostics:
            if watch := diagnostic.watch(self._due):
                setup.worker.watch_steps(watch)

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
        snapshot = of_round(state, self._own, self._setup.held_out)
        for diagnostic in self._diagnostics:
            try:
                entry = diagnostic.look(snapshot)
            except (FedkeelError, ArithmeticError, RuntimeError, ValueError) as error:
                # The run is worth more than this look at it.
                self._note(f"Round {from_one(snapshot.round)} has no record of '{diagnostic.name}': {error}")
                continue
            self._measured[diagnostic.name].append(entry)
            path = records_file(self._directory, diagnostic.name)
            with explained(path), open(path, "ab") as file:
                file.write(_line(entry))
            try:
                figures = diagnostic.draw(self._measured[diagnostic.name])
            except FedkeelError as error:
                self._note(f"Round {from_one(snapshot.round)}: {error}")
                continue
            diagnostic.write(self._directory, diagnostic.document(figures))

    def round_done(self, round: int, rounds: int, scores: Scores | None, loss: float) -> None:
        """What is made of the run's own records, once the round is among them."""
        if not self._due(round):
            return
        setup = self._setup
        # Pooled data no longer tell whose they are: those that have a name are read again.
        is_lost = setup.worker.method.is_pooled and setup.config.data != PYTHON_OBJECT
        objects = Objects(None if is_lost else setup.federation)
        for diagnostic in self._of_records:
            try:
                figures = diagnostic.of_run(Run(self._directory), objects)
            except FedkeelError as error:
                # Between checkpoints the newest records may not be on disk yet; after the last round they are.
                if round == rounds - 1:
                    self._note(f"There is no '{diagnostic.name}' of this run: {error}")
                continue
            diagnostic.write(self._directory, diagnostic.document(figures))


def _line(entry: Measured) -> bytes:
    return json.dumps({"round": entry.round, "values": entry.values}).encode() + b"\n"
