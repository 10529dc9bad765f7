"""Run a federation, resume one, and read what a run left behind."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedkeel import analysis
from fedkeel import config as configuration
from fedkeel.config import MACHINE_OPTIONS, Config
from fedkeel.core import naming
from fedkeel.core.evaluation import Evaluation
from fedkeel.core.method import Method
from fedkeel.data.federation import Federation
from fedkeel.engine.checks import check_objects, refuse_name
from fedkeel.engine.children import leave_if_imported_again
from fedkeel.engine.examination import examine
from fedkeel.engine.executors.executor import names_single_threaded
from fedkeel.engine.executors.flower.roster import FILE as SITES
from fedkeel.engine.metrics import asked
from fedkeel.engine.rounds import Federated
from fedkeel.engine.setup import Setup, prepare
from fedkeel.errors import FedkeelError, shortages_explained
from fedkeel.observer import Observer, Observers
from fedkeel.options import as_path, described
from fedkeel.runs.intact import how_to_continue
from fedkeel.runs.measures import FILE as MEASURES
from fedkeel.runs.measures import Measures, document, predictions, reported
from fedkeel.runs.origin import Origin, records, refuse_other_data
from fedkeel.runs.run import PYTHON_OBJECT, Run
from fedkeel.runs.store import Store, numbered
from fedkeel.runs.summary import summarise_run


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
    check_objects(federation=federation, model=model, method=method, observer=observer)
    directory = None if directory is None else as_path(directory)
    given = {"data": federation, "model": model, "method": method}
    settings = settings.replace(**{name: PYTHON_OBJECT for name, thing in given.items() if thing is not None})
    setup = prepare_run(settings, federation=federation, model=model, method=method)
    setup = setup.with_threads((observer or Observer()).note)
    files = records(setup, given)
    store = Store.create(directory or free_directory(settings), setup.config, files)
    return finish(store, setup, observer).remember(model=model, method=method)


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
    check_objects(federation=federation, model=model, method=method, observer=observer)
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
    if before and not settings.threads and not names_single_threaded(settings) and "workers" not in machine:
        # As many as it began with, whatever this machine would take: their number decides the last bits.
        settings = settings.replace(threads=before.threads or 0)
    setup = prepare_run(settings, federation=federation, model=model, method=method)
    refuse_other_data(run.directory, setup)
    for note in Origin.of(setup).notes(before, run.directory) if before else ():
        (observer or Observer()).note(note)
    return finish(Store.open(directory), setup, observer).remember(model=model, method=method)


def finish(store: Store, setup: Setup, observer: Observer | None) -> Run:
    """Run the rounds that are left and write the result."""
    began = time.perf_counter() - store.seconds()  # of earlier starts
    executor, refused = None, False
    observer = observer or Observer()
    try:
        if setup.config.record:
            recorder = analysis.Recorder(analysis.requested(setup.config), store.directory, setup, observer.note)
            observer = Observers([observer, recorder])
        executor = setup.executor(store.memory_files)
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
        examined = reported(examine(federated, server))
        store.finish(summary, {**initial, **model}, personal, tables(setup, examined, observer.note))
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
        yield from predictions(examined, classes)


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
