"""Run a federation, resume one, and read what a run left behind."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedkeel import config as configuration
from fedkeel import methods, naming, state
from fedkeel.config import MACHINE_OPTIONS, Config
from fedkeel.counting import from_one
from fedkeel.data.federation import Federation
from fedkeel.engine.flower.roster import FILE as SITES
from fedkeel.engine.flower.roster import Roster
from fedkeel.engine.rounds import Federated
from fedkeel.engine.setup import Setup, build_model, load_federation, prepare
from fedkeel.errors import FedkeelError, nearest
from fedkeel.given import as_path, described
from fedkeel.intact import Files, how_to_continue
from fedkeel.method import Composition, Method
from fedkeel.models.output import Classifier
from fedkeel.objects import check_objects, refuse_name
from fedkeel.observer import Observer, Observers
from fedkeel.origin import Origin, read_outline, records, refuse_other_data
from fedkeel.profile import FILE as PROFILE
from fedkeel.shortage import shortages_explained
from fedkeel.spawning import leave_if_imported_again
from fedkeel.store import MODEL, SUMMARY, Store, read_config
from fedkeel.summary import unsound
from fedkeel.tables import weakest

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes

PYTHON_OBJECT = "(given in Python)"
MOST_NAMED = 20  # clients to choose from, in a sentence


@shortages_explained()
def simulate(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    directory: str | Path | None = None,
    federation: Federation | None = None,
    model: nn.Module | str | None = None,
    method: Method | str | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> Run:
    """Train a federation and return its run.

    Args:
        config: a `Config`, a table of options, the path of a TOML file, or nothing; `options` override it.
        directory: where the run is stored; by default a new one in `runs/`.
        federation, model, method: objects to use in place of what the configuration names; model and method may
            also be names.
        observer: is told how the run is going.

    >>> import fedkeel                                                             # doctest: +SKIP
    >>> fedkeel.simulate(method="fedprox(mu=0.1)", rounds=10).accuracy             # doctest: +SKIP
    """
    leave_if_imported_again()
    if isinstance(method, str):
        options["method"], method = method, None
    if isinstance(model, str):
        options["model"], model = model, None
    settings = _settings(config, options)
    check_objects(federation, model, method, observer)
    directory = None if directory is None else as_path(directory)
    given = {"data": federation, "model": model, "method": method}
    settings = settings.replace(**{name: PYTHON_OBJECT for name, thing in given.items() if thing is not None})
    setup = _prepare(settings, federation, model, method)
    setup = setup.with_threads((observer or Observer()).note)
    files = records(setup, given)
    return finish(Store.create(directory or free_directory(settings), setup.config, files), setup, observer)


@shortages_explained()
def resume(
    directory: str | Path,
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    method: Method | None = None,
    observer: Observer | None = None,
    **machine: Any,
) -> Run:
    """Go on with a run that was stopped, from its last good checkpoint. A finished run is returned as it is.

    `machine` are options that do not change the result, `device="cpu"` or `workers=4`, where they are to be others
    than those the run began with. Data that have changed since then are refused; other code and another kind of machine
    are told of.
    """
    leave_if_imported_again()
    for name in machine:
        if name not in MACHINE_OPTIONS:
            raise FedkeelError(
                f"'{name}' cannot change when a run is resumed: give only {', '.join(MACHINE_OPTIONS)}, "
                "or start a new run."
            )
    check_objects(federation, model, method, observer)
    run = Run(directory)
    settings = run.config.replace(**machine)
    if run.finished:
        run.check()
        (observer or Observer()).note(f"'{directory}' is finished: nothing is left to do.")
        return run
    for name, thing in (("data", federation), ("model", model), ("method", method)):
        if getattr(run.config, name) == PYTHON_OBJECT and thing is None:
            raise FedkeelError(
                f"The {name} of '{directory}' was given in Python, not by name: "
                f"resume it with fedkeel.resume(..., {'federation' if name == 'data' else name}=...)."
            )
    if federation is None and (run.directory / SITES).exists():
        raise FedkeelError(
            f"'{directory}' is a run over a network, whose images are at the sites: continue it with "
            f"'{how_to_continue(directory)}'."
        )
    before = Origin.load(run.directory)
    settings = _with_the_same_threads(settings, before, machine)
    setup = _prepare(settings, federation, model, method)
    refuse_other_data(run.directory, setup)
    for note in Origin.of(setup).notes(before, run.directory) if before else ():
        (observer or Observer()).note(note)
    return finish(Store.open(directory), setup, observer)


def _with_the_same_threads(config: Config, before: Origin | None, machine: Mapping[str, Any]) -> Config:
    """As many as the run began with, whatever this machine would take: their number decides the last bits."""
    others = config.executor == "processes" or "workers" in machine
    if config.threads or others or before is None or not before.threads:
        return config
    return config.replace(threads=before.threads)


def finish(store: Store, setup: Setup, observer: Observer | None) -> Run:
    """Run the rounds that are left and write the result."""
    began = time.perf_counter() - store.seconds()  # of earlier starts
    executor, refused = None, False
    observer = observer or Observer()
    try:
        if setup.config.record:
            observer = Observers([observer, _recorder(store, setup, observer)])
        executor = setup.executor(store.shelf)
        federated = Federated(setup, executor, store, observer)
        server = federated.run()
        run = Run(store.directory)
        store.flush()
        result = summarise_run(run, setup.held_out)
        summary = result | {
            "untested_domains": [name for name in setup.domains if name not in result["domains"]],
            "executor": setup.executor_name,
            "device": str(setup.worker.device),
            "seconds": time.perf_counter() - began,
        }
        model = federated.best_model or {**server.weights, **server.statistics}
        # What every client has of its own was never trained here, and must not pass for a part of a model.
        personal = federated.local_tensors() if federated.method.is_personal else ()
        initial = {} if federated.method.is_personal else setup.worker.initial_local
        store.finish(summary, {**initial, **model}, personal)
    except FedkeelError:
        refused = store.is_blank
        raise
    finally:
        if executor is not None:
            executor.close()
        if refused:
            store.discard()
        else:
            store.close()
            setup.profile.save(store.directory)
    return Run(store.directory)


def _prepare(config: Config, federation: Federation | None, model: nn.Module | None, method: Method | None) -> Setup:
    """As `prepare`, with the diagnostics to be recorded refused as early as can be."""
    if not config.record:
        return prepare(config, federation=federation, model=model, method=method)
    from fedkeel import analysis  # looks at runs, so it imports this module

    diagnostics = analysis.chosen(config)
    setup = prepare(config, federation=federation, model=model, method=method)
    for diagnostic in diagnostics:
        diagnostic.check(setup.worker)
    return setup


def _recorder(store: Store, setup: Setup, observer: Observer) -> Observer:
    from fedkeel import analysis

    return analysis.Recorder(analysis.chosen(setup.config), store.directory, setup, observer.note)


def _settings(config: Config | Mapping[str, Any] | str | Path | None, options: dict[str, Any]) -> Config:
    if isinstance(config, Config):
        return config.replace(**options)
    if isinstance(config, (str, Path)):
        refuse_name(config)
        config = configuration.read(config)
    if config is not None and not isinstance(config, Mapping):
        raise FedkeelError(
            f"The configuration is {described(config)}: give a Config, a table of options or a TOML file; federation, "
            "model and method are given by name, like method='fedbn'."
        )
    return configuration.from_dict({**(config or {}), **options})


def free_directory(config: Config) -> Path:
    """`runs/data-method-seed0`, or that with a number when it is taken."""
    base = naming.slug(f"{config.data.partition('(')[0]}-{config.method}-seed{config.seed}")
    for number in range(1, 10_000):
        path = Path("runs") / (base if number == 1 else f"{base}-{number}")
        if not path.exists():
            return path
    raise FedkeelError(f"'runs/{base}' and ten thousand after it are taken: give a directory with --out.")


class Run(Files):
    """A run directory, read. Also of a run that is not finished yet."""

    def __init__(self, directory: str | Path) -> None:
        super().__init__(as_path(directory))
        self.config = read_config(directory)

    @property
    def given(self) -> Mapping[str, Mapping[str, str]]:
        """What stands for the objects that were given in Python, by option: the `name` of each, and a `digest`."""
        objects = [name for name in ("data", "model", "method") if getattr(self.config, name) == PYTHON_OBJECT]
        origin = Origin.load(self.directory) if objects else None
        return {name: origin.given[name] for name in objects if origin and name in origin.given}

    def __repr__(self) -> str:
        result = f"{self.accuracy:.1%}" if self.finished else "unfinished"
        return f"Run('{self.directory}', method='{self.config.method}', {result})"

    @property
    def summary(self) -> dict[str, Any] | None:
        path = self.directory / SUMMARY
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_bytes(), parse_constant=_null)
        except (OSError, ValueError) as error:
            raise FedkeelError(f"'{path}' cannot be read: {error}.") from error
        if not isinstance(found, dict):
            raise FedkeelError(f"'{path}' holds no table of results: it was not written by a run.")
        self.intact(SUMMARY)
        return found

    def sound_summary(self, *, whole: bool = True) -> dict[str, Any] | None:
        """The summary with everything that is shown of it, or of its results alone; an error where somebody has been at
        it."""
        summary = self.summary
        problem = unsound(summary, whole=whole) if summary is not None else ""
        if problem:
            raise self.changed(SUMMARY, problem)
        return summary

    @property
    def profile(self) -> dict[str, Any] | None:
        """Where the time went, see `fedkeel.profile`; None for a run without `profile`."""
        path = self.directory / PROFILE
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def accuracy(self) -> float:
        """The result: mean accuracy over the training domains, by the rule that the configuration names."""
        return float(self._result()["accuracy"])

    @property
    def domains(self) -> dict[str, float]:
        """The result for each domain."""
        return dict(self._result()["domains"])

    def accuracy_of(self, client: str) -> float | None:
        """The result on one client's own test images, by the same rule; None where it was not tested."""
        result = self._result()
        last = {entry["round"] for entry in self.scores(statistics=result.get("statistics"))[-10:]}
        rounds = last if result["result"] == "mean-last-10" else {result["round"]}
        found = [
            record["accuracy"]
            for record in self.records("evaluation")
            if record["client"] == client and record["split"] == "test" and record["round"] in rounds
            if record["statistics"] == result.get("statistics", "global") and record["accuracy"] is not None
        ]
        return sum(found) / len(found) if found else None

    def _result(self) -> dict[str, Any]:
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
        for place, line in enumerate(lines):
            try:
                record = json.loads(line, parse_constant=_null)
                is_record = isinstance(record, dict) and "kind" in record
            except ValueError:
                is_record = False
            if is_record:
                records.append(record)
            elif line.strip() and place < len(lines) - 1:
                unreadable += 1
        return records, unreadable

    def scores(self, split: str = "test", statistics: str | None = None) -> list[dict[str, Any]]:
        """One entry per evaluated round."""
        chosen = [r for r in self.records("scores") if r["split"] == split]
        kinds = {r["statistics"] for r in chosen}
        wanted = statistics or ("global" if "global" in kinds else next(iter(kinds), "global"))
        return [r for r in chosen if r["statistics"] == wanted]

    def frame(self, kind: str = "scores") -> pandas.DataFrame:
        """The records of one kind as a pandas table, a row each; of "scores" and "evaluation" those of every split.

        The accuracy of each domain in "scores" is a column of its own, `domains.NAME`.
        """
        try:
            import pandas
        except ImportError:
            raise FedkeelError(
                "A table needs pandas, which is not installed: pip install 'fedkeel[notebook]'."
            ) from None
        rows = []
        for record in self.records(kind):
            domains = record.get("domains", {})
            rest = {name: value for name, value in record.items() if name not in ("kind", "domains")}
            row = rest | {f"domains.{name}": value for name, value in domains.items()}
            # As pandas has no number, also where a column has none at all, e.g. the loss of a model that diverged.
            rows.append({name: math.nan if value is None else value for name, value in row.items()})
        return pandas.DataFrame(rows)

    def plot_accuracy(self, axes: Axes | None = None, *, domains: bool = True) -> Axes:
        """Test accuracy by round, on average and, unless told otherwise, of each domain; returns matplotlib's axes."""
        try:
            from matplotlib import pyplot
        except ImportError:
            raise FedkeelError(
                "A plot needs matplotlib, which is not installed: pip install 'fedkeel[notebook]'."
            ) from None
        scores = self.scores()
        if not scores:
            raise FedkeelError(f"'{self.directory}' has no evaluated round yet: let it train further.")
        axes = axes if axes is not None else pyplot.subplots()[1]
        rounds = [from_one(entry["round"]) for entry in scores]
        if domains:
            for name in dict.fromkeys(name for entry in scores for name in entry["domains"]):
                values = [100 * entry["domains"].get(name, math.nan) for entry in scores]  # sites come and go
                axes.plot(rounds, values, linewidth=1, alpha=0.7, label=naming.plot_text(name))
        axes.plot(rounds, [100 * entry["average"] for entry in scores], linewidth=2, color="black", label="average")
        axes.set_xlabel("round")
        axes.set_ylabel("test accuracy in %")
        axes.set_title(naming.plot_text(f"{self.config.method} on {self.config.data}"))
        axes.legend()
        return axes

    def model(self, client: str | None = None) -> Classifier:
        """The trained model, on the CPU, in evaluation mode; `client` as in `network`."""
        return self.network(client)[0]

    def network(self, client: str | None = None) -> tuple[Classifier, Federation]:
        """The trained model to be used somewhere else, in evaluation mode, and the data it is for, in outline.

        `client` names whose model, where the method keeps layers on its clients. Neither the data nor the weights that
        the run started from need to be there.
        """
        self._result()
        federation = self._outline()
        if federation is None or PYTHON_OBJECT in (self.config.model, self.config.method):
            raise FedkeelError(
                f"'{self.directory}' was made with objects given in Python: load its {MODEL} into your own."
            )
        method = Composition.of(methods.build(self.config.method))
        files = [MODEL]
        if method.is_personal:
            files.append(self._personal_file(client))
        elif client is not None:
            raise FedkeelError(
                f"'{self.config.method}' has one model for all clients: leave the client '{client}' out."
            )
        network = build_model(self.config.replace(weights=""), federation, method, None)
        entries = network.state_dict(keep_vars=True)
        for file in files:
            tensors = self.tensors(file)
            strange = [n for n, t in tensors.items() if n not in entries or entries[n].shape != t.shape]
            if strange:
                raise FedkeelError(
                    f"'{self.directory / file}' has '{strange[0]}', which '{self.config.model}' has not here, or in "
                    "another size: read it with the version of Fedkeel, or of your own model, that wrote it."
                )
            state.load(entries, tensors)
        return network.eval(), federation

    def _outline(self) -> Federation | None:
        """The data without the images; of a run of an earlier version, the data themselves where they have a name."""
        if roster := Roster.load(self.directory):
            return roster.outline()
        if outline := read_outline(self.directory):
            return outline.federation()
        return None if self.config.data == PYTHON_OBJECT else load_federation(self.config)

    def _personal_file(self, client: str | None) -> str:
        folder = self.directory / "personal"
        kept = [naming.name_of(path.stem) for path in sorted(folder.glob("*.safetensors"))]
        if client is None:
            others = f" and {len(kept) - MOST_NAMED} others" if len(kept) > MOST_NAMED else ""
            raise FedkeelError(
                f"'{self.config.method}' keeps layers on its clients, so each has a model of its own: say whose with "
                f"--client (client=... in Python), one of {', '.join(map(naming.visible, kept[:MOST_NAMED]))}{others}."
            )
        path = naming.find(folder, client, ".safetensors")
        if path is None:
            raise FedkeelError(f"There is no model of a client '{client}': {nearest(client, kept)}")
        return f"{folder.name}/{path.name}"


def _null(_constant: str) -> None:
    """JSON has neither NaN nor infinity; a file that has them all the same was not written here."""


def summarise_run(run: Run, held_out: list[str], statistics: str | None = None) -> dict[str, Any]:
    """The result by the configured rule, with what it cost; under the given statistics where both were evaluated."""
    scores, rule = run.scores(statistics=statistics), run.config.result
    tested = {entry["round"] for entry in scores}
    validation = [entry for entry in run.scores("validation") if entry["round"] in tested]
    if rule == "best-validation" and not validation:
        rule = "last"  # those who have validation images never replied: the model is that of the last round too
    if rule == "best-validation":
        best = max(validation, key=lambda entry: (entry["average"], -entry["round"]))["round"]
        chosen = [entry for entry in scores if entry["round"] == best]
    else:
        chosen = scores[-10:] if rule == "mean-last-10" else scores[-1:]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    where = {(entry["round"], "test", entry["statistics"]) for entry in chosen}
    tests = (e for e in run.records("evaluation") if (e["round"], e["split"], e["statistics"]) in where)
    losses = [entry["loss"] for entry in chosen if entry["loss"] is not None]

    rounds = run.records("round")
    names = dict.fromkeys(name for entry in chosen for name in entry["domains"])  # sites come and go
    unseen = [entry["unseen"] for entry in chosen if entry["unseen"] is not None]
    return {
        "method": run.config.method,
        "result": rule,
        "round": chosen[-1]["round"],
        "rounds": run.config.rounds,
        "accuracy": mean([entry["average"] for entry in chosen]),
        "samples_accuracy": mean([entry["samples"] for entry in chosen]),
        "unseen": mean(unseen) if unseen else None,
        "domains": {name: mean([e["domains"][name] for e in chosen if name in e["domains"]]) for name in names},
        "unseen_domains": held_out,
        "diverged_domains": list(dict.fromkeys(test["domain"] for test in tests if test["loss"] is None)),
        "loss": mean(losses) if losses else None,
        "statistics": chosen[-1]["statistics"],
        "bytes_up": sum(record["bytes_up"] for record in rounds),
        "bytes_down": sum(record["bytes_down"] for record in rounds),
        "questions": sum(record["questions"] for record in rounds),
        "dropped_updates": sum(record["dropped"] for record in rounds),
        **({"epsilon": rounds[-1]["epsilon"], "delta": run.config.dp_delta} if "epsilon" in rounds[-1] else {}),
        **({"randomness": weakest(rounds)} if "epsilon" in rounds[-1] else {}),
    }
