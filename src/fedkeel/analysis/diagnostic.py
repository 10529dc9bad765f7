"""What a diagnostic is: numbers measured at a moment of a run, and the figures made of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

from torch import nn

from fedkeel import spec
from fedkeel.analysis.figures import Figure, by_round
from fedkeel.analysis.snapshot import Objects, Snapshot, of_run
from fedkeel.config import from_one
from fedkeel.core.state import batch_norms
from fedkeel.engine.local import StepWatch, Worker
from fedkeel.errors import FedkeelError, first_line
from fedkeel.files import explained, plain, write_atomically
from fedkeel.nn.calibration import normalised_layers
from fedkeel.registry import Registry
from fedkeel.runs.run import Run

FOLDER = "diagnostics"
LAYERS: dict[str, Callable[[nn.Module], Mapping[str, nn.Module]]] = {
    "batch norm": batch_norms,
    "batch-norm statistics": normalised_layers,  # also those that HBN's layers have
}
Values = dict[str, Any]
"""What a diagnostic measures: a table that JSON can hold."""


class Measured(NamedTuple):
    """What was measured in a round; a table that JSON can hold. See `over_rounds`."""

    round: int
    values: Values

    def __str__(self) -> str:
        return f"round {from_one(self.round)}"


class Diagnostic:
    """One way to look at a run, while it trains or after it.

    A diagnostic writes `measure` and `figures`; or, if the run's own records and data are all that it needs, `of_run`.
    Its docstring is `what` a reader is told. No example here, since it looks at a run: see "Add a diagnostic in one
    file" in Contributing.
    """

    name: ClassVar[str] = ""
    title: ClassVar[str] = ""
    what: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    of_every_model: ClassVar[bool] = False  # after a run: of each that it kept, not of the last one alone
    needs: ClassVar[str] = ""  # layers without which there is nothing to see: one of `LAYERS`
    has_options: bool = False  # given by whoever asks, who then does not want what was recorded with others

    @property
    def of_records(self) -> bool:
        """Whether the run's own records and data are all that it needs."""
        return type(self).of_run is not Diagnostic.of_run

    def check(self, worker: Worker) -> None:
        """Refuse, before anything trains, a run in which there is nothing to measure."""
        if self.needs and not LAYERS[self.needs](worker.model):
            raise FedkeelError(
                f"'{self.name}' looks at {self.needs}, and the model of '{worker.method.name}' has none: choose "
                "another diagnostic, or a model and a method with batch norm."
            )

    def watch(self, is_recorded: Callable[[int], bool]) -> Callable[[nn.Module], StepWatch] | None:
        """What looks at every local step, if that is needed: called with the model."""
        return None

    def measure(self, snapshot: Snapshot) -> Values:
        """What is to be seen at this moment."""
        raise NotImplementedError

    def figures(self, measured: list[Measured]) -> list[Figure]:
        """The figures of what was measured, of one round or of several."""
        raise NotImplementedError

    def of_run(self, run: Run, objects: Objects) -> list[Figure]:
        """From what was recorded while the run trained, or else, and if options are given, from the models it kept."""
        measured = [] if self.has_options else recorded(run.directory, self.name)
        if not measured:
            snapshots = of_run(run, objects)
            chosen = sorted(snapshots, key=lambda s: s.round) if self.of_every_model else snapshots[-1:]
            self.check(chosen[0].worker)
            measured = [self._after_run(snapshot) for snapshot in chosen]
        return self.draw(measured)

    def look(self, snapshot: Snapshot) -> Measured:
        return Measured(snapshot.round, plain(self.measure(snapshot)))

    def _after_run(self, snapshot: Snapshot) -> Measured:
        """As `look`; a sentence where that is not possible, as of a model that has diverged."""
        try:
            return self.look(snapshot)
        except FedkeelError:
            raise
        except (ArithmeticError, RuntimeError, ValueError) as error:
            raise FedkeelError(
                f"'{self.name}' cannot be computed of round {from_one(snapshot.round)}: {first_line(error)}."
            ) from error

    def draw(self, measured: list[Measured]) -> list[Figure]:
        """The figures; a sentence where a model that has diverged leaves no numbers for them."""
        try:
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

    def write(self, directory: Path, document: dict[str, Any]) -> None:
        """`directory`: the run's, or any other in its place."""
        path = directory / FOLDER / f"{self.name}.json"
        with explained(path, then=""):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(document, allow_nan=False).encode() + b"\n")


def _lacks_numbers(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return any(map(_lacks_numbers, value)) if isinstance(value, list | tuple) else value is None


DIAGNOSTICS: Registry[Diagnostic] = Registry("diagnostic")
"""The diagnostics by name."""
D = TypeVar("D", bound=type[Diagnostic])


def diagnostic(name: str) -> Callable[[D], D]:
    """Decorator: make a diagnostic known under `name`; see `Diagnostic`."""

    def remember(cls: D) -> D:
        cls.name, cls.what = name, cls.what or " ".join((cls.__doc__ or "").split())
        return DIAGNOSTICS.register(name, summary=cls.title, paper=cls.paper)(cls)

    return remember


def build(text: str, **options: Any) -> Diagnostic:
    """A diagnostic from its name, with options as in `tsne(samples=500)` or as keywords.

    >>> from fedkeel import analysis
    >>> analysis.build("tsne", samples=500).samples
    500
    """
    parsed = spec.parse(text)
    options = {**parsed.options, **options}
    built = DIAGNOSTICS.make(parsed.name, **options)
    built.has_options = bool(options)
    return built


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


def over_rounds(
    title: str,
    y_label: str,
    measured: list[Measured],
    values: str | Callable[[Values], Mapping[str, float | None]],
    **more: Any,
) -> list[Figure]:
    """Lines over the rounds of what stands under `values`, or is made by it; none where a single round was measured.

    >>> two = [Measured(0, {"loss": {"fedavg": 2.0}}), Measured(1, {"loss": {"fedavg": 1.5}})]
    >>> over_rounds("Loss", "loss", two, "loss")[0]["series"]
    [{'name': 'fedavg', 'x': [1, 2], 'y': [2.0, 1.5]}]
    """
    take = itemgetter(values) if isinstance(values, str) else values
    rounds = {entry.round: take(entry.values) for entry in measured}
    return [by_round(title, y_label, rounds, **more)] if len(rounds) > 1 else []


def names(text: str) -> list[str]:
    """Of an option that lists them with commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
