"""Run a federation, resume one, and read what a run left behind."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from fedkeel import analysis
from fedkeel import config as configuration
from fedkeel.config import MACHINE_OPTIONS, Config
from fedkeel.core import imports, naming
from fedkeel.core.evaluation import Evaluation
from fedkeel.core.method import Method
from fedkeel.data.federation import Federation, called
from fedkeel.engine.checks import check_objects, refuse_unused
from fedkeel.engine.executors.executor import names_single_threaded
from fedkeel.engine.executors.sites.roster import FILE as SITES
from fedkeel.engine.idle import refuse_idle
from fedkeel.engine.metrics import asked
from fedkeel.engine.outcome import examine, model_of, personal_of
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
from fedkeel.runs.origin import Origin, data_from_afar, records, refuse_other_data
from fedkeel.runs.progress import watched
from fedkeel.runs.run import PYTHON_OBJECT, Run
from fedkeel.runs.store import Store, numbered
from fedkeel.runs.summary import stopped_early, summarise_run
from fedkeel.runs.timing import read_timing, seconds_of


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
    **options: Any,
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
    imports.refuse_while_importing()
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
    objects = {"data": federation, "model": model, "method": method}
    settings = settings.replace(**{name: PYTHON_OBJECT for name, thing in objects.items() if thing is not None})
    setup = build(settings, federation=federation, model=model, method=method)
    with watched(observer, verbose) as observer:
        store = Store.create(directory or free_directory(settings), setup.config, records(setup, objects))
        return finish(store, setup, observer).remember(model=model, method=method)


@shortages_explained()
def resume(
    directory: str | Path,
    *,
    rounds: int | None = None,
    observer: Observer | None = None,
    verbose: bool | None = None,
    **others: Any,
) -> Run:
    """Go on with a run that was stopped, from its last good checkpoint. A finished run is returned as it is.

    Args:
        directory: of the run.
        rounds: of a finished run, go on until it has had so many in all; the result is that of a run of so many. A
            schedule or a method that goes by the number of rounds is refused: its first rounds would have been others.
            A run that was stopped early gets new patience.
        observer, verbose: as in `simulate`.
        others: `federation`, `model` and `method`, where the run was given objects; and options that do not change the
            result, `device="cpu"` or `workers=4`, where they are to be others than those the run began with.

    Data that have changed since then are refused; other code and another kind of machine are told of.

    >>> run = fedkeel.simulate(rounds=1, subsample=30, directory="runs/whole")
    >>> fedkeel.resume("runs/whole").accuracy == run.accuracy
    True
    >>> fedkeel.resume("runs/whole", rounds=2).rounds_done
    2
    """
    imports.refuse_while_importing()
    machine: dict[str, Any] = {**others}
    objects = {name: machine.pop(name, None) for name in ("federation", "model", "method")}
    if unknown := next((name for name in machine if name not in MACHINE_OPTIONS), ""):
        raise FedkeelError(
            f"'{unknown}' cannot change when a run is resumed: give only {', '.join(MACHINE_OPTIONS)}, "
            "or start a new run."
        )
    check_objects(**objects, observer=observer)
    run = Run(directory)
    settings = run.config.replace(**machine, **({} if rounds is None else {"rounds": rounds}))
    if run.finished:
        run.check()
    if rounds is not None:
        _refuse_more_rounds(run, rounds)
    elif run.finished:
        (observer or Observer()).note(f"'{directory}' is finished: nothing is left to do.")
        return run
    _refuse_what_is_not_here(run, objects)
    setup, notes = _as_it_began(run, settings, objects, machine)
    with watched(observer, verbose) as observer, closing(Store.open(directory)) as store:
        for note in notes:
            observer.note(note)
        if rounds is not None:
            reopen(run, store, setup.worker.method, rounds)
        return finish(store, setup, observer).remember(model=objects["model"], method=objects["method"])


# -- to go on --------------------------------------------------------------------------------------------------------
def _refuse_more_rounds(run: Run, rounds: int) -> None:
    directory = run.directory
    if not run.finished:
        raise FedkeelError(f"'{directory}' is not finished: first '{how_to_continue(directory)}', then add rounds.")
    if (directory / SITES).exists():
        raise FedkeelError(f"'{directory}' is a run over a network: start another one with '--weights' of its model.")
    if rounds <= run.rounds_done:
        raise FedkeelError(f"'{directory}' has had {run.rounds_done} rounds, and 'rounds' is {rounds}: give more.")


def _refuse_what_is_not_here(run: Run, objects: Mapping[str, Any]) -> None:
    for name, thing in zip(("data", "model", "method"), objects.values(), strict=True):
        if getattr(run.config, name) == PYTHON_OBJECT and thing is None:
            raise FedkeelError(
                f"The {name} of '{run.directory}' was given in Python, not by name: "
                f"give it again, {'federation' if name == 'data' else name}=...."
            )
    if objects["federation"] is None and (run.directory / SITES).exists():
        how = how_to_continue(run.directory)
        raise FedkeelError(
            f"'{run.directory}' is a run over a network, with data at its sites: continue it with '{how}'."
        )
    imports.refuse_unknown_names(run.directory)


def _as_it_began(
    run: Run, settings: Config, objects: Mapping[str, Any], asked: Collection[str]
) -> tuple[Setup, Iterable[str]]:
    """What goes on, refused if it is not what began; and what to tell of what is another."""
    before = Origin.load(run.directory)
    if before and not settings.threads and not names_single_threaded(settings) and "workers" not in asked:
        # As many as it began with, whatever this machine would take: their number decides the last bits.
        settings = settings.replace(threads=before.threads or 0)
    federation = objects["federation"] or data_from_afar(run.directory, settings)
    setup = build(settings, federation=federation, model=objects["model"], method=objects["method"], asked=asked)
    refuse_other_data(run.directory, setup)
    return setup, Origin.of(setup).notes(before, run.directory) if before else ()


# -- the walk --------------------------------------------------------------------------------------------------------
def build(
    config: Config,
    *,
    federation: Federation | None = None,
    model: nn.Module | None = None,
    method: Method | None = None,
    asked: Collection[str] | None = None,
) -> Setup:
    """Every name resolved and every refusal made; nothing changes the result afterwards.

    `asked`: of the options only these were asked for now, and must have an effect; by default all.
    """
    refuse_idle(config, asked)
    diagnostics = analysis.requested(config) if config.record else ()
    setup = prepare(config, federation=federation, model=model, method=method)
    for diagnostic in diagnostics:
        diagnostic.check(setup.worker)
    return setup


def finish(store: Store, setup: Setup, observer: Observer | None) -> Run:
    """Run the rounds that are left and write the result; begin at the last checkpoint again where memory was lost."""
    while True:
        live = observer if isinstance(observer, Live) else Live(store.directory, observer or Observer())
        try:
            with _ended(store, live):
                return _finish(store, setup, live)
        except LostMemory as lost:
            live.note(f"{lost} The run goes on from there.")
            store = Store.open(store.directory)


@contextmanager
def _ended(store: Store, live: Live) -> Iterator[None]:
    """Whatever ends the run, whoever watches it is told; one that was refused before its first round leaves nothing."""
    refused, reason = False, STOPPED
    try:
        yield
        reason = ""
    except FedkeelError as error:
        refused, reason = store.is_blank, str(error)
        raise
    finally:
        live.end(reason)
        if refused:
            store.discard()
        else:
            store.close()


def _finish(store: Store, setup: Setup, live: Live) -> Run:
    began = time.perf_counter() - sum(map(seconds_of, read_timing(store.directory)))  # of earlier starts
    observer, config = Observers([live, live.then]), setup.config
    if config.record:
        recorder = analysis.Recorder(analysis.requested(config), store.directory, setup, live.note)
        observer = Observers([live, live.then, recorder])
    with closing(setup.executor()) as executor:
        federated = Federated(setup, executor, store, observer)
        server = federated.run()
        store.flush()
        run, setup = Run(store.directory), federated.setup
        examined = reported(examine(federated, server))
        found = summarise_run(run, setup.held_out)
        summary = found | {
            "untested_domains": [name for name in setup.domains if name not in found["domains"]],
            "executor": setup.executor_name,
            "device": str(setup.worker.device),
            "seconds": time.perf_counter() - began,
            **({"extended": [*store.extended]} if store.extended else {}),
        }
        store.finish(summary, model_of(federated, server), personal_of(federated), tables(setup, examined, live.note))
    if stopped := stopped_early(summary, config.patience):
        live.note(stopped)
    if federated.best.round < 0 and config.select_by != "accuracy":
        live.note(f"The validation data give no '{config.select_by}': the result is the last round's.")
    return run


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


def _settings(config: Config | Mapping[str, Any] | str | Path | None, options: dict[str, Any]) -> Config:
    if isinstance(config, Config):
        return config.replace(**options)
    if isinstance(config, (str, Path)):
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
