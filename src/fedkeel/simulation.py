"""Run a federation, resume one, and read what a run left behind."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from fedkeel import analysis
from fedkeel import config as configuration
from fedkeel.config import MACHINE_OPTIONS, Config
from fedkeel.core import imports, naming
from fedkeel.core.evaluation import Evaluation
from fedkeel.core.method import Method
from fedkeel.data.federation import Federation, called
from fedkeel.engine.checks import check_objects, refuse_name, refuse_unused
from fedkeel.engine.children import leave_if_imported_again
from fedkeel.engine.examination import examine
from fedkeel.engine.executors.executor import names_single_threaded
from fedkeel.engine.executors.flower.roster import FILE as SITES
from fedkeel.engine.idle import refuse_idle
from fedkeel.engine.metrics import asked
from fedkeel.engine.rounds import Federated
from fedkeel.engine.setup import Setup, prepare
from fedkeel.engine.tasks import LostMemory
from fedkeel.errors import FedkeelError, shortages_explained
from fedkeel.observer import Observer, Observers
from fedkeel.options import as_path, described
from fedkeel.runs.extension import reopen
from fedkeel.runs.intact import how_to_continue, refuse_to_hide
from fedkeel.runs.live import STOPPED, Live
from fedkeel.runs.measures import FILE as MEASURES
from fedkeel.runs.measures import Measures, document, predictions, reported
from fedkeel.runs.origin import Origin, data_from_afar, records, refuse_other_code, refuse_other_data
from fedkeel.runs.progress import watched
from fedkeel.runs.run import PYTHON_OBJECT, Run
from fedkeel.runs.store import Store, numbered
from fedkeel.runs.summary import stopped_early, summarise_run

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from fedkeel.runs.keywords import MachineOptions, RunOptions

    class Others(MachineOptions, total=False):
        federation: Federation | None
        model: nn.Module | None
        method: Method | None


@shortages_explained()
def simulate(
    config: Config | Mapping[str, Any] | str | Path | None = None,
    *,
    directory: str | Path | None = None,
    federation: Federation | None = None,
    model: nn.Module | str | None = None,
    method: Method | str | None = None,
    observer: Observer | None = None,
    verbose: bool | None = None,
    **options: Unpack[RunOptions],
) -> Run:
    """Train a federation and return its run.

    Args:
        config: a `Config`, a table of options, the path of a TOML file, or nothing; `options` override it.
        directory: where the run is stored; by default a new one in `runs/`.
        federation, model, method: objects to use in place of what the configuration names; model and method may
            also be names.
        observer: is told how the run is going.
        verbose: show progress; by default where a person looks, on a terminal or in a notebook.
        options: as in `Config`.

    What cannot work (a name that does not exist, data that cannot be read) raises `FedkeelError` before training.

    >>> run = fedkeel.simulate(method="fedprox(mu=0.1)", rounds=2, subsample=30)
    >>> run.rounds_done, sorted(run.domains)
    (2, ['paper', 'scan', 'street', 'stroke', 'texture'])
    """
    leave_if_imported_again()
    given: dict[str, Any] = {**options}
    if isinstance(method, str):
        given["method"], method = method, None
    if isinstance(model, str):
        given["model"], model = model, None
    settings = _settings(config, given)
    check_objects(federation=federation, model=model, method=method, observer=observer)
    refuse_unused(given, federation=federation)
    if directory is not None:
        directory = as_path(directory)
        refuse_to_hide(directory)
    given = {"data": federation, "model": model, "method": method}
    settings = settings.replace(**{name: PYTHON_OBJECT for name, thing in given.items() if thing is not None})
    refuse_idle(settings)
    setup = prepare_run(settings, federation=federation, model=model, method=method)
    with watched(observer, verbose) as observer:
        store = Store.create(directory or free_directory(settings), setup.config, records(setup, given))
        return finish(store, setup, observer).remember(model=model, method=method)


@shortages_explained()
def resume(
    directory: str | Path,
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    method: Method | None = None,
    observer: Observer | None = None,
    verbose: bool | None = None,
    changed_code: bool = False,
    **machine: Unpack[MachineOptions],
) -> Run:
    """Go on with a run that was stopped, from its last good checkpoint. A finished run is returned as it is.

    `machine` are options that do not change the result, `device="cpu"` or `workers=4`, where they are to be others
    than those the run began with. Data that have changed since then are refused, and so is other code of the method or
    the model, unless `changed_code` says to go on; another kind of machine is told of. `verbose` as in `simulate`.

    >>> run = fedkeel.simulate(rounds=1, subsample=30, directory="runs/whole")
    >>> fedkeel.resume("runs/whole").accuracy == run.accuracy
    True
    """
    objects = {"federation": federation, "model": model, "method": method}
    return _go_on(directory, objects, {**machine}, (observer, verbose), changed_code=changed_code)


@shortages_explained()
def extend(
    directory: str | Path,
    *,
    rounds: int,
    observer: Observer | None = None,
    verbose: bool | None = None,
    changed_code: bool = False,
    **others: Unpack[Others],
) -> Run:
    """Go on with a finished run until it has had `rounds` in all; the result is that of a run of so many.

    A schedule or a method that goes by the number of rounds is refused: its first rounds would have been others. A run
    that was stopped early gets new patience. The other arguments are those of `resume`.

    >>> run = fedkeel.simulate(rounds=1, subsample=30, directory="runs/longer")
    >>> fedkeel.extend("runs/longer", rounds=2).rounds_done
    2
    """
    machine: dict[str, Any] = {**others}
    objects = {name: machine.pop(name, None) for name in ("federation", "model", "method")}
    return _go_on(directory, objects, machine, (observer, verbose), changed_code=changed_code, rounds=rounds)


def _go_on(
    directory: str | Path,
    objects: Mapping[str, Any],
    machine: Mapping[str, Any],
    watching: tuple[Observer | None, bool | None],
    *,
    changed_code: bool,
    rounds: int | None = None,
) -> Run:
    observer, verbose = watching
    leave_if_imported_again()
    for name in machine:
        if name not in MACHINE_OPTIONS:
            raise FedkeelError(
                f"'{name}' cannot change when a run is resumed: give only {', '.join(MACHINE_OPTIONS)}, "
                "or start a new run."
            )
    check_objects(**objects, observer=observer)
    run = Run(directory)
    settings = run.config.replace(**machine)
    if run.finished:
        run.check()
    if rounds is not None:
        settings = settings.replace(rounds=rounds)
        _refuse_to_extend(run, rounds)
    elif run.finished:
        (observer or Observer()).note(f"'{directory}' is finished: nothing is left to do.")
        return run
    for name, thing in zip(("data", "model", "method"), objects.values(), strict=True):
        if getattr(run.config, name) == PYTHON_OBJECT and thing is None:
            raise FedkeelError(
                f"The {name} of '{directory}' was given in Python, not by name: "
                f"give it again, {'federation' if name == 'data' else name}=...."
            )
    if objects["federation"] is None and (run.directory / SITES).exists():
        how = how_to_continue(directory)
        raise FedkeelError(f"'{directory}' is a run over a network, with data at its sites: continue it with '{how}'.")
    imports.refuse_unknown_names(run.directory)
    refuse_idle(settings, machine)
    before = Origin.load(run.directory)
    if before and not settings.threads and not names_single_threaded(settings) and "workers" not in machine:
        # As many as it began with, whatever this machine would take: their number decides the last bits.
        settings = settings.replace(threads=before.threads or 0)
    objects = {**objects, "federation": objects["federation"] or data_from_afar(run.directory, settings)}
    setup = prepare_run(settings, **objects)
    refuse_other_data(run.directory, setup)
    now = Origin.of(setup)
    if before and not changed_code:
        refuse_other_code(run.directory, before, now)
    with watched(observer, verbose) as observer:
        for note in now.notes(before, run.directory) if before else ():
            observer.note(note)
        store = Store.open(directory)
        if rounds is not None:
            try:
                reopen(run, store, setup.worker.method, rounds)
            except BaseException:
                store.close()
                raise
        return finish(store, setup, observer).remember(model=objects["model"], method=objects["method"])


def _refuse_to_extend(run: Run, rounds: int) -> None:
    directory, done = run.directory, run.rounds_done
    if not run.finished:
        raise FedkeelError(f"'{directory}' is not finished: first '{how_to_continue(directory)}', then extend it.")
    if (directory / SITES).exists():
        raise FedkeelError(f"'{directory}' is a run over a network: start another one with '--weights' of its model.")
    if rounds <= done:
        raise FedkeelError(f"'{directory}' has had {done} rounds, and 'rounds' is {rounds}: give more.")


def finish(store: Store, setup: Setup, observer: Observer | None) -> Run:
    """Run the rounds that are left and write the result; begin at the last checkpoint again where memory was lost."""
    while True:
        try:
            return _finish(store, setup, observer)
        except LostMemory as lost:
            (observer or Observer()).note(f"{lost} The run goes on from there.")
            store = Store.open(store.directory)


def _finish(store: Store, setup: Setup, observer: Observer | None) -> Run:
    began = time.perf_counter() - store.seconds()  # of earlier starts
    executor, refused, reason = None, False, STOPPED
    live = observer if isinstance(observer, Live) else Live(store.directory, observer or Observer())
    observer = Observers([live, live.then])
    try:
        if setup.config.record:
            recorder = analysis.Recorder(analysis.requested(setup.config), store.directory, setup, observer.note)
            observer = Observers([live, live.then, recorder])
        executor = setup.executor()
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
            **({"extended": [*store.extended]} if store.extended else {}),
        }
        model = federated.best_model or {**server.weights, **server.statistics}
        # What every client has of its own was never trained here, and must not pass for a part of a model.
        personal = federated.local_tensors() if federated.method.is_personal else ()
        initial = {} if federated.method.is_personal else setup.worker.initial_local
        examined = reported(examine(federated, server))
        store.finish(summary, {**initial, **model}, personal, tables(setup, examined, observer.note))
        if stopped := stopped_early(summary, setup.config.patience):
            observer.note(stopped)
        if federated.best["round"] < 0 and setup.config.select_by != "accuracy":
            observer.note(f"The validation data give no '{setup.config.select_by}': the result is the last round's.")
        reason = ""
    except FedkeelError as error:
        refused, reason = store.is_blank, str(error)
        raise
    finally:
        live.end(reason)
        if executor is not None:
            executor.close()
        if refused:
            store.discard()
        else:
            store.close()
    return Run(store.directory)


def tables(setup: Setup, examined: Sequence[Evaluation], note: Callable[[str], None]) -> Iterator[tuple[str, bytes]]:
    """The files with what the resulting model does on the test sets; what is remarkable about it is told."""
    if not examined:
        return
    config, classes = setup.config, setup.given.classes
    text = json.dumps(document(examined, classes, setup.held_out, asked(config)), separators=(",", ":")).encode()
    for sentence in Measures.read(text).notes():
        note(sentence)
    yield MEASURES, text + b"\n"
    if config.predictions:
        yield from predictions(examined, classes, setup.given.paths, called(setup.given.image_shape))


def prepare_run(
    config: Config,
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    method: Method | None = None,
) -> Setup:
    """As `prepare`, with the diagnostics to be recorded refused as early as can be."""
    diagnostics = analysis.requested(config) if config.record else ()
    setup = prepare(config, federation=federation, model=model, method=method)
    for diagnostic in diagnostics:
        diagnostic.check(setup.worker)
    return setup


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
    free = next((path for path in numbered(base) if not path.exists()), None)
    if free is None:
        raise FedkeelError(f"'runs/{base}' and ten thousand after it are taken: give a directory with --out.")
    return free
