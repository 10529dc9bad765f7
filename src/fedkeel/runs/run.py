"""A run directory, read: what a run left behind, and the model it trained."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedkeel import methods
from fedkeel.config import PYTHON_OBJECT as PYTHON_OBJECT
from fedkeel.config import Config, first_of, from_one
from fedkeel.core import imports, state
from fedkeel.core.composition import Composition
from fedkeel.core.method import Method
from fedkeel.core.readable import html_table, text_table
from fedkeel.core.types import Classifier
from fedkeel.data.federation import Federation
from fedkeel.data.transforms import Unknown
from fedkeel.drawing.show import Drawing
from fedkeel.engine.checks import check_objects
from fedkeel.engine.executors.sites.roster import Roster
from fedkeel.engine.setup import build_model
from fedkeel.errors import FedkeelError
from fedkeel.files import parsed
from fedkeel.options import as_path
from fedkeel.runs.intact import how_to_continue
from fedkeel.runs.measures import Measured, Measures
from fedkeel.runs.origin import Origin, read_outline
from fedkeel.runs.site_model import SiteModel
from fedkeel.runs.store import CONFIG, MODEL, SUMMARY, read_config
from fedkeel.runs.summary import is_record, unsound
from fedkeel.runs.tables import as_frame, named, shown
from fedkeel.runs.trained import Predictions, Trained
from fedkeel.spec import Spec, parse

if TYPE_CHECKING:
    import pandas


def given_in_python(config: Config) -> list[str]:
    """The options in whose place an object was given, which no configuration and no command can name."""
    return [name for name in ("data", "model", "method") if getattr(config, name) == PYTHON_OBJECT]


class Run(Measured):
    """A run directory, read. Also of a run that is not finished yet.

    >>> run = fedkeel.simulate(rounds=1, subsample=30)
    >>> fedkeel.Run(run.directory).accuracy == run.accuracy
    True
    """

    def __init__(self, directory: str | Path) -> None:
        super().__init__(as_path(directory))
        if self.finished:
            self.intact(CONFIG)
        self.config = read_config(directory)
        self._objects: dict[str, Any] = {}  # see `remember`

    @property
    def given(self) -> Mapping[str, Mapping[str, str]]:
        """What stands for the objects that were given in Python, by option: the `name` of each, and a `digest`."""
        objects = given_in_python(self.config)
        origin = Origin.load(self.directory) if objects else None
        return {name: origin.given[name] for name in objects if origin and name in origin.given}

    def __repr__(self) -> str:
        return text_table(*shown(self))

    def _repr_html_(self) -> str:
        return html_table(*shown(self))

    @property
    def summary(self) -> dict[str, Any] | None:
        if not self.finished:
            return None
        try:
            found = parsed(self.intact(SUMMARY))
        except ValueError as error:
            if isinstance(error, FedkeelError):
                raise
            raise self.changed(SUMMARY, f"text is no JSON ({error})") from error
        if not isinstance(found, dict):
            raise self.changed(SUMMARY, "table of results is missing")
        return found

    def sound_summary(self, *, whole: bool = True) -> dict[str, Any] | None:
        """The summary with all that is shown of it, or its results alone; an error where somebody has been at it."""
        summary = self.summary
        problem = unsound(summary, whole=whole) if summary is not None else ""
        if problem:
            raise self.changed(SUMMARY, problem)
        return summary

    @property
    def accuracy(self) -> float:
        """The result: mean accuracy over the training domains, by the rule that the configuration names."""
        return float(self.result()["accuracy"])

    @property
    def domains(self) -> dict[str, float]:
        """The result for each domain."""
        return dict(self.result()["domains"])

    def accuracy_of(self, client: str) -> float | None:
        """The result on one client's own test images, by the same rule; None where it was not tested."""
        result = self.result()
        last = {entry["round"] for entry in self.scores(statistics=result.get("statistics"))[-10:]}
        rounds = last if result["result"] == "mean-last-10" else {result["round"]}
        found = [
            record["accuracy"]
            for record in self.records("evaluation")
            if record["client"] == client and record["split"] == "test" and record["round"] in rounds
            if record["statistics"] == result.get("statistics", "global") and record["accuracy"] is not None
        ]
        return sum(found) / len(found) if found else None

    def result(self) -> dict[str, Any]:
        """The summary of a finished run."""
        summary = self.sound_summary(whole=False)
        if summary is None:
            raise FedkeelError(
                f"'{self.directory}' is not finished: continue it with '{how_to_continue(self.directory)}'."
            )
        return summary

    def records(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl`, or those of one kind: round, client, dropped, evaluation, scores."""
        return [record for record in self.readable()[0] if kind is None or record["kind"] == kind]

    def readable(self) -> tuple[list[dict[str, Any]], int]:
        """The lines of `metrics.jsonl` that are records, and how many are not; of a run that is still writing its last
        line, that one does not count."""
        lines = self.metrics().splitlines()
        records, unreadable = [], 0
        for number, line in enumerate(lines, start=1):
            record: Any = None
            with suppress(ValueError):
                record = parsed(line)
            if is_record(record):
                records.append(record)
            elif line.strip() and number < len(lines):
                unreadable += 1
        return records, unreadable

    @property
    def rounds_done(self) -> int:
        """How many are recorded: of a run that stopped early, fewer than its configuration names."""
        return from_one(max((record["round"] for record in self.records("round")), default=-1))

    def scores(self, split: str = "test", statistics: str | None = None) -> list[dict[str, Any]]:
        """One entry per evaluated round."""
        scores = [record for record in self.records("scores") if record["split"] == split]
        wanted = statistics or first_of(record["statistics"] for record in scores)
        return [record for record in scores if record["statistics"] == wanted]

    def evaluated(self) -> list[dict[str, Any]]:
        """As `scores`, of a run that has been evaluated at least once; an error where it has not."""
        scores = self.scores()
        if not scores:
            raise FedkeelError(f"'{self.directory}' has no evaluated round yet: let it train further.")
        return scores

    def frame(self, kind: str = "scores") -> pandas.DataFrame:
        """The records of one kind as a pandas table, a row each; of "scores" and "evaluation" those of every split.

        The accuracy of each domain in "scores" is a column of its own, `domains.NAME`; of a metric that was asked for
        there is the average, and `METRIC.domains.NAME`. "measures" are those of the resulting model, with intervals.
        """
        if kind == "measures":
            return as_frame(list(self.measures.rows()))
        rows = []
        for record in self.records(kind):
            row = {name: value for name, value in record.items() if name not in ("kind", "domains", "metrics")}
            row |= {f"domains.{name}": value for name, value in record.get("domains", {}).items()}
            for metric, found in record.get("metrics", {}).items():
                row |= {metric: found["average"]} | {f"{metric}.domains.{n}": v for n, v in found["domains"].items()}
            rows.append(row)
        return as_frame(rows)

    def plot(self, *, domains: bool = True) -> Drawing:
        """Test accuracy by round, on average and, unless told otherwise, of each domain: a figure that a notebook shows
        and that `save("accuracy.svg")` writes."""
        scores = self.evaluated()
        curves = {"average": [entry["average"] for entry in scores]}
        for name in dict.fromkeys(name for entry in scores for name in entry["domains"]) if domains else ():
            # Sites come and go; and one may be called as the mean of all is.
            curves[name if name != "average" else "average (a domain)"] = [e["domains"].get(name) for e in scores]
        rounds = [from_one(entry["round"]) for entry in scores]
        series = [
            {"name": name, "x": rounds, "y": [value if value is None else 100 * value for value in values]}
            for name, values in curves.items()
        ]
        data = named(self, "data").partition("(")[0] or "data given in Python"  # its options are too long for a title
        about = {
            "title": f"{named(self, 'method')} on {data}",
            "x_label": "round",
            "y_label": f"{self.config.evaluate_on} accuracy, %",
        }
        return Drawing({"kind": "lines", "series": series, "percent": True, **about})

    def model(self, client: str | None = None) -> Classifier:
        """The trained model, on the CPU, in evaluation mode; `client` as in `network`."""
        return self.network(client)[0]

    def predict(self, images: Any, *, client: str | None = None, tolerate: bool = False) -> Predictions:
        """What the trained model says of images: see `fedkeel.runs.trained.Trained.predict`."""
        return self.trained(client).predict(images, tolerate=tolerate)

    def trained(
        self,
        client: str | None = None,
        *,
        model: nn.Module | None = None,
        method: Method | None = None,
        calibrated: str | Path | None = None,
    ) -> Trained:
        """The trained model to be used: with the names of its classes, and how images become its input. What is given
        is as in `fedkeel.load`."""
        network, federation = self.network(client, model=model, method=method, calibrated=calibrated)
        if isinstance(federation.test_transform, Unknown):
            raise FedkeelError(
                f"How images become what the network of '{self.directory}' sees is not known here, since it was done "
                "at its sites or by a transform given in Python: use Run.model(), and prepare its input yourself."
            )
        return Trained.around(network, federation, self._columns())

    def evaluate(self, data: Any, labels: Any = None, *, sites: Any = None, **whose: Any) -> Measures:
        """How good the trained model is on new labelled images, see `fedkeel.runs.trained.Trained.evaluate`; `client`
        or `calibrated` say whose model, as in `fedkeel.load`."""
        return self.trained(**whose).evaluate(data, labels, sites=sites)

    def _columns(self) -> dict[str, str]:
        """What the columns of the table that it was trained on are called, where that was said."""
        data = parse(self.config.data) if self.config.data != PYTHON_OBJECT else Spec("")
        named = {name: data.options.get(name) for name in ("path", "label", "site")} if data.name == "table" else {}
        return {name: str(column) for name, column in named.items() if column is not None}

    def remember(self, **objects: Any) -> Run:
        """Keep the objects that it was made with in this process: no file can."""
        self._objects = _present(**objects)
        return self

    def network(
        self,
        client: str | None = None,
        *,
        model: nn.Module | None = None,
        method: Method | None = None,
        calibrated: str | Path | None = None,
    ) -> tuple[Classifier, Federation]:
        """The trained model to be used somewhere else, in evaluation mode, and the data it is for, in outline.

        `client` names whose model, where the method keeps layers on its clients. `model` and `method` are the objects
        that the run was made with, where they were not named; of a run of this process they are known. Neither the
        data nor the weights that the run started from need to be there. `calibrated` as in `fedkeel.load`.
        """
        self.result()
        federation, given = self._outline(), {**self._objects, **_present(model=model, method=method)}
        for name in (name for name in given_in_python(self.config) if name != "data" and name not in given):
            raise FedkeelError(
                f"The {name} of '{self.directory}' was given in Python: load it with fedkeel.load(DIR, {name}=...) and "
                "one that is made in the same way."
            )
        for name in _present(model=model, method=method).keys() - given_in_python(self.config):
            raise FedkeelError(
                f"The {name} of '{self.directory}' has a name, '{getattr(self.config, name)}': leave it out."
            )
        if federation is None:
            raise FedkeelError(f"'{self.directory}' lacks federation.json, of which its network is built: put it back.")
        imports.refuse_unknown_names(self.directory)
        composition = Composition.of(given.get("method") or methods.build(self.config.method))
        site = None if calibrated is None else SiteModel.read(as_path(calibrated, "calibrated"))
        if site is not None and client is None:
            client = site.card.get("client")
        network = build_model(without_weights(self.config), federation, composition, given.get("model"))
        if client is not None and not composition.is_personal:
            raise FedkeelError(
                f"'{self.config.method}' has one model for all clients: leave the client '{client}' out."
            )
        files = [MODEL, *([self.personal_file(client, self.config.method)] if composition.is_personal else [])]
        if site is not None and site.card.get("files") != self.checksums(files):
            raise FedkeelError(
                f"'{calibrated}' was not made of the model in '{self.directory}' as it is now, or of another client's: "
                "calibrate this one with 'fedkeel calibrate'."
            )
        entries = network.state_dict(keep_vars=True)
        groups = {str(self.directory / file): self.tensors(file) for file in files}
        for file, tensors in (groups if site is None else {**groups, str(calibrated): site.tensors}).items():
            strange = [n for n, t in tensors.items() if n not in entries or entries[n].shape != t.shape]
            if strange:
                raise FedkeelError(
                    f"'{file}' has '{strange[0]}', which '{self.config.model}' has not here, or in "
                    "another size: read it with the version of Fedkeel, or of your own model, that wrote it."
                )
            state.load(entries, tensors)
        return network.eval(), federation

    def _outline(self) -> Federation | None:
        """The data without the images."""
        if roster := Roster.load(self.directory):
            return roster.outline()
        outline = read_outline(self.directory)
        return outline.federation() if outline is not None else None


def load(
    directory: str | Path,
    *,
    client: str | None = None,
    model: nn.Module | None = None,
    method: Method | None = None,
    calibrated: str | Path | None = None,
) -> Trained:
    """The trained model of a finished run, which may have been copied from another machine.

    Args:
        directory: of the run.
        client: whose model, for a method that keeps layers on its clients.
        model, method: the objects that the run was made with, where they were given in Python and not by name. The
            model need not be trained: it gets the run's weights, and the layers that the method puts into it.
        calibrated: a .safetensors file that `fedkeel.calibrate` made of this run: the model for that site.

    >>> run = fedkeel.simulate(rounds=1, subsample=30, directory="runs/digits")
    >>> fedkeel.load("runs/digits").predict(torch.zeros(2, 16, 16, dtype=torch.uint8))
    Predictions(2 images, 10 classes)
    """
    check_objects(model=model, method=method)
    return Run(directory).trained(client, model=model, method=method, calibrated=calibrated)


def without_weights(config: Config) -> Config:
    """As it is built where its weights come from a file: nothing is fetched."""
    model = parse(config.model) if config.model != PYTHON_OBJECT else Spec(config.model)
    if "pretrained" not in model.options:
        return config.replace(weights="")
    return config.replace(weights="", model=str(replace(model, options={**model.options, "pretrained": False})))


def _present(**objects: Any) -> dict[str, Any]:
    return {name: thing for name, thing in objects.items() if thing is not None}
