"""What a diagnostic is: numbers measured at a moment of a run, and the figures made of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from fedkeel import spec
from fedkeel.analysis.figures import Figure
from fedkeel.analysis.moment import Moment, Objects, of_run
from fedkeel.config import from_one
from fedkeel.core.state import batch_norms
from fedkeel.engine.local import StepWatch, Worker
from fedkeel.errors import FedkeelError
from fedkeel.files import explained, write_atomically
from fedkeel.registry import Registry
from fedkeel.runs.run import Run
from fedkeel.runs.store import plain

FOLDER = "diagnostics"
Values = dict[str, Any]


class Measured(NamedTuple):
    """What was measured in a round; a table that JSON can hold."""

    round: int
    values: Values


class Diagnostic:
    """One way to look at a run, while it trains or after it.

    A diagnostic writes `measure` and `figures`; or, if the run's own records and data are all that it needs, `of_run`,
    and says so with `of_records`.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    what: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    of_records: ClassVar[bool] = False
    needs_batch_norm: ClassVar[bool] = False
    has_options: bool = False  # given by whoever asks, who then does not want what was recorded with others

    def check(self, worker: Worker) -> None:
        """Refuse, before anything trains, a run in which there is nothing to measure."""
        if self.needs_batch_norm and not batch_norms(worker.model):
            raise FedkeelError(
                f"'{self.name}' looks at batch norm, and the model of '{worker.method.name}' has none: choose another "
                "diagnostic, or a model and a method with batch norm."
            )

    def watch(self, is_recorded: Callable[[int], bool]) -> Callable[[Any], StepWatch] | None:
        """What looks at every local step, if that is needed: called with the model."""
        return None

    def moments(self, run: Run, objects: Objects) -> list[Moment]:
        """What is looked at after a run of which nothing was recorded: its end."""
        return [of_run(run, objects)]

    def measure(self, moment: Moment) -> Values:
        raise NotImplementedError

    def figures(self, measured: Sequence[Measured]) -> list[Figure]:
        raise NotImplementedError

    def of_run(self, run: Run, objects: Objects) -> list[Figure]:
        """From what was recorded while the run trained, or else, and if options are given, from the model that it ended
        with."""
        measured = [] if self.has_options else recorded(run.directory, self.name)
        if not measured:
            moments = self.moments(run, objects)
            self.check(moments[0].worker)
            measured = [self._after_run(moment) for moment in moments]
        return self.draw(measured)

    def look(self, moment: Moment) -> Measured:
        with np.errstate(all="ignore"):  # what is not finite is shown as a dash
            return Measured(moment.round, plain(self.measure(moment)))

    def _after_run(self, moment: Moment) -> Measured:
        """As `look`; a sentence where that is not possible, as of a model that has diverged."""
        try:
            return self.look(moment)
        except FedkeelError:
            raise
        except (ArithmeticError, RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
            raise FedkeelError(
                f"'{self.name}' cannot be computed of round {from_one(moment.round)}: {reason}."
            ) from error

    def draw(self, measured: Sequence[Measured]) -> list[Figure]:
        """The figures; a sentence where a model that has diverged leaves no numbers for them."""
        try:
            with np.errstate(all="ignore"):
                return self.figures(measured)
        except TypeError as error:
            if not any(map(_lacks_numbers, measured)):
                raise
            raise FedkeelError(
                f"'{self.name}' has no figure: its numbers are not finite, the model has diverged."
            ) from error

    def document(self, figures: Sequence[Figure]) -> dict[str, Any]:
        texts = {"name": self.name, "title": self.title, "what": self.what, "paper": self.paper}
        return {**texts, "figures": [plain(figure) for figure in figures]}

    def write(self, directory: Path, document: dict[str, Any]) -> Path:
        """`directory`: the run's, or any other in its place."""
        path = directory / FOLDER / f"{self.name}.json"
        with explained(path, then=""):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(document, allow_nan=False).encode() + b"\n")
        return path


def _lacks_numbers(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return any(map(_lacks_numbers, value)) if isinstance(value, list | tuple) else value is None


DIAGNOSTICS: Registry[Diagnostic] = Registry("diagnostic")
D = TypeVar("D", bound=type[Diagnostic])


def diagnostic(name: str) -> Callable[[D], D]:
    """Decorator: make a diagnostic known under `name`."""

    def remember(cls: D) -> D:
        cls.name = name
        return DIAGNOSTICS.register(name, summary=cls.title, paper=cls.paper)(cls)

    return remember


def build(text: str, **options: Any) -> Diagnostic:
    """A diagnostic from its name, with options as in `tsne(samples=500)` or as keywords."""
    parsed = spec.parse(text)
    options = {**parsed.options, **options}
    chosen = DIAGNOSTICS.make(parsed.name, **options)
    chosen.has_options = bool(options)
    return chosen


def records_file(directory: Path, name: str) -> Path:
    return directory / FOLDER / f"{name}.jsonl"


def recorded(directory: Path, name: str) -> list[Measured]:
    """What was recorded of a run, a round each; a last line that was not written to its end does not count."""
    path = records_file(directory, name)
    measured = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            measured.append(Measured(int(record["round"]), record["values"]))
        except (json.JSONDecodeError, KeyError, TypeError):
            break
    return measured
