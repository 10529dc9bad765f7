"""A run over a network: wait for the sites, agree with them, then the ordinary round loop."""

import secrets
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

import fedkeel
from fedkeel import spec
from fedkeel.config import Config
from fedkeel.core.composition import Composition
from fedkeel.data.site import image_shape
from fedkeel.engine.checks import check_training
from fedkeel.engine.executors.executor import Executor
from fedkeel.engine.executors.sites.channel import Channel, Table
from fedkeel.engine.executors.sites.executor import POLL, TELL, SitesExecutor, Status
from fedkeel.engine.executors.sites.roster import Description, Roster, agree, describe
from fedkeel.engine.idle import refuse_idle
from fedkeel.engine.setup import Setup, prepare
from fedkeel.errors import FedkeelError, MethodError
from fedkeel.methods import build as build_method
from fedkeel.observer import Observer
from fedkeel.runs.intact import refuse_to_hide
from fedkeel.runs.live import STOPPED, Live
from fedkeel.runs.run import Run
from fedkeel.runs.store import Store, fingerprint, read_config
from fedkeel.simulation import finish, free_directory
from fedkeel.spec import names
from fedkeel.stopping import Stopped, stop_requested
from fedkeel.trust import privacy
from fedkeel.trust.robust import Defence

PATIENCE = 120.0  # seconds, for a site to say who it is


@dataclass(frozen=True)
class Waiting:
    """For whom a run waits before it begins: so many sites, or all of `named`, for so many seconds; then it begins with
    `min_clients` or more."""

    sites: int = 0
    seconds: float = 600
    named: tuple[str, ...] = ()


@dataclass(frozen=True)
class NetworkSetup(Setup):
    """A run whose clients are at other machines."""

    network: SitesExecutor = field(kw_only=True)

    def executor(self) -> Executor:
        return self.network

    def noise_from(self) -> str:
        # The clients of a simulation, which have positions, draw from what one process would.
        apart = self.config.dp == "local" and all(site.position is None for site in self.network.roster.sites)
        return "sites" if apart else super().noise_from()

    def account(self, rounds: int) -> dict[str, Any]:
        """A server that is started again repeats the rounds since its last checkpoint, with noise of their own."""
        repeated = (self.network.roster.starts - 1) * self.config.checkpoint_every
        return super().account(rounds + repeated)


def check(config: Config) -> None:
    """What can be refused before any site is waited for."""
    method = Composition.of(build_method(config.method))
    if method.is_pooled:
        raise MethodError(f"'{method.name}' pools the data of all clients, which over a network stay where they are.")
    Defence.of(config.robust).check(method)
    privacy.refuse_contradictions(config, method)
    check_training(config)
    refuse_idle(config, network=True)


def begun(config: Config, directory: Path) -> bool:
    """Whether the directory holds a run of these options; one of others is refused."""
    if not (directory / "config.toml").exists():
        return False
    if fingerprint(read_config(directory)) != fingerprint(config):
        raise FedkeelError(
            f"'{directory}' holds a run of another configuration: resume it with its own config.toml, "
            "or choose another directory."
        )
    return True


def train(
    channel: Channel,
    config: Config,
    out: str | Path | None = None,
    waiting: Waiting | None = None,
    observer: Observer | None = None,
    model: nn.Module | None = None,
) -> Run:
    """Train over the sites that come; a run directory that holds a run is resumed."""
    check(config)
    observer = observer or Observer()
    directory = Path(out) if out else free_directory(config)
    if begun(config, directory):
        run = Run(directory)
        if run.finished:
            return run
        store, before = Store.open(directory), Roster.load(directory)
    else:
        refuse_to_hide(directory)
        store, before = Store.create(directory, config), None
    live = observer = Live(directory, observer)  # who waits for sites watches this, too
    try:
        network = enrol(channel, config, before, waiting or Waiting(), observer, directory)
        setup = prepare_network(config, network, directory, model)
    except BaseException as error:
        live.end(str(error) if isinstance(error, FedkeelError) else STOPPED)
        if isinstance(error, FedkeelError) and store.is_blank:
            store.discard()
        store.close()
        raise
    return finish(store, setup, observer)


def enrol(
    channel: Channel, config: Config, before: Roster | None, waiting: Waiting, observer: Observer, directory: Path
) -> SitesExecutor:
    """Who takes part, of those that are here and, when a run goes on, of those that took part before."""
    run = before.run if before else secrets.token_hex(8)
    status = Status(directory)
    for name in (*waiting.named, *(site.name for site in (before.sites if before else ()))):
        status.set(name, "not connected", connected=False)
    status.save()
    answers = meet(channel, session(run, config, None), config, waiting, observer, status)
    described = {name: site for name, site in answers.items() if isinstance(site, Description)}
    options = spec.parse(config.data).options
    classes = before.classes if before else names(options["classes"]) if "classes" in options else None
    unseen = [*names(config.unseen), *names(options.get("unseen", ()))]
    absent = [site for site in (before.sites if before else ()) if site.name not in described]
    sites = [*absent, *described.values()]
    roster = agree(run, sites, classes=classes, shape=image_shape(config), unseen=unseen)
    roster.starts = before.starts + 1 if before else 1
    roster.sitting_out |= {name: reason for name, reason in answers.items() if isinstance(reason, str)}
    roster.sitting_out |= {name: "it did not come" for name in waiting.named if name not in answers}
    for name, reason in roster.sitting_out.items():
        observer.note(f"The site '{name}' sits out: {reason}.")
        status.set(name, f"sits out: {reason}", connected=name in answers)
    told = {name: {"do": "sit out", "reason": reason} for name, reason in roster.sitting_out.items() if name in answers}
    for _ in channel.exchange(told, b"", TELL) if told else ():
        """Whatever they reply: they are told, so that nobody there waits in the dark."""
    roster.refuse_empty()
    status.save()
    return SitesExecutor(channel, roster, session(run, config, roster.classes), config, observer.note, status)


def meet(
    channel: Channel, opening: Table, config: Config, waiting: Waiting, observer: Observer, status: Status
) -> dict[str, Description | str]:
    """What the sites say of themselves, as they come, until all have come or the waiting is over."""
    wanted = waiting.sites or len(waiting.named) or config.min_clients
    answers: dict[str, Description | str] = {}
    began = told = time.monotonic()
    while len(answers) < wanted:
        new = [name for name in channel.sites() if name not in answers]
        found = describe(channel, new, opening, min(config.round_timeout, PATIENCE))
        for name, answer in found.items():
            status.set(name, "connected" if isinstance(answer, Description) else f"sits out: {answer}")
        status.save()
        answers |= found
        now, came = time.monotonic(), [*answers.values()]
        fit = sum(isinstance(answer, Description) for answer in came)
        if len(answers) >= wanted or (now - began > waiting.seconds and fit >= config.min_clients):
            break
        if now >= told:
            observer.note(f"{len(answers)} of {wanted} sites are here{missing(waiting.named, answers)}.")
            told = now + TELL
        if stop_requested.wait(POLL):
            raise Stopped
    return answers


def missing(named: Sequence[str], here: Container[str]) -> str:
    """Whom it waits for, where it knows their names."""
    absent = [name for name in named if name not in here]
    return f", waiting for {', '.join(absent)}" if absent else ""


def prepare_network(config: Config, network: SitesExecutor, directory: Path, model: nn.Module | None) -> NetworkSetup:
    """As `prepare`, of what the sites told; the first files of the run."""
    setup = prepare(config.replace(executor="serial"), federation=network.roster.outline(), model=model)
    if config.weights and setup.worker.layout.local:
        raise MethodError(
            f"'{config.method}' keeps layers at the sites, and these cannot start from '{config.weights}', "
            "which only the server has: leave 'weights' out."
        )
    network.roster.save(directory)
    if config.dp == "central":
        # Every site is told the seed: what the server draws of its own must not follow from it.
        setup = replace(setup, rules=privacy.choose_rules(config, secret=True))
    return NetworkSetup(config, setup.worker, setup.given, "sites", setup.rules, network=network)


def session(run: str, config: Config, classes: tuple[str, ...] | None) -> Table:
    """What every request carries, so that a site needs to remember nothing of earlier ones."""
    return {
        "run": run,
        "version": fedkeel.__version__,
        "config": config.to_dict(),
        "classes": None if classes is None else list(classes),
    }
