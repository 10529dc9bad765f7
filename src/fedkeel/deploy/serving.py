"""A run over a network: wait for the sites, agree with them, then the ordinary round loop."""

import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

import fedkeel
from fedkeel import spec
from fedkeel.config import Config
from fedkeel.core.composition import Composition
from fedkeel.data.federation import Federation
from fedkeel.data.site import image_shape
from fedkeel.engine.checks import check_training
from fedkeel.engine.executors.executor import Executor
from fedkeel.engine.executors.flower.channel import Table
from fedkeel.engine.executors.flower.executor import FlowerExecutor, Status
from fedkeel.engine.executors.flower.roster import Enrolment, Roster, agree
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
from fedkeel.trust import privacy
from fedkeel.trust.robust import Defence


@dataclass(frozen=True)
class NetworkSetup(Setup):
    """A run whose clients are at other machines."""

    network: FlowerExecutor = field(kw_only=True)

    def executor(self) -> Executor:
        return self.network

    def grown(self) -> Federation | None:
        return self.network.roster.outline() if self.network.admit_newcomers() else None

    def noise_from(self) -> str:
        # The nodes of a simulation, which have positions, draw from what one process would.
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


def train(
    enrolment: Enrolment,
    config: Config,
    out: str | Path | None = None,
    observer: Observer | None = None,
    model: nn.Module | None = None,
) -> Run:
    """Train over the sites that enrol; a run directory that holds a run is resumed."""
    check(config)
    observer = observer or Observer()
    directory = Path(out) if out else free_directory(config)
    if (directory / "config.toml").exists():
        if fingerprint(read_config(directory)) != fingerprint(config):
            raise FedkeelError(
                f"'{directory}' holds a run of another configuration: resume it with its own config.toml, "
                "or choose another directory."
            )
        run = Run(directory)
        if run.finished:
            return run
        store, before = Store.open(directory), Roster.load(directory)
    else:
        refuse_to_hide(directory)
        store, before = Store.create(directory, config), None
    live = observer = Live(directory, observer)  # who waits for sites watches this, too
    try:
        network = enrol(enrolment, config, before, observer, directory)
        setup = prepare_network(config, network, directory, model)
    except BaseException as error:
        live.end(str(error) if isinstance(error, FedkeelError) else STOPPED)
        if isinstance(error, FedkeelError) and store.is_blank:
            store.discard()
        store.close()
        raise
    return finish(store, setup, observer)


def enrol(
    enrolment: Enrolment, config: Config, before: Roster | None, observer: Observer, directory: Path
) -> FlowerExecutor:
    """Who takes part, of those that are here and, when a run goes on, of those that took part before."""
    run = before.run if before else secrets.token_hex(8)
    status = Status(directory)
    for name in (*(enrolment.owners or {}).values(), *(site.name for site in (before.sites if before else ()))):
        status.set(name, "not connected", connected=False)
    status.save()

    def came(site: str) -> None:
        status.set(site, "connected")
        status.save()

    described, failed = enrolment.wait_for_sites(session(run, config, None), config, observer.note, came)
    options = spec.parse(config.data).options
    classes = before.classes if before else names(options["classes"]) if "classes" in options else None
    unseen = [*names(config.unseen), *names(options.get("unseen", ()))]
    here = {site.name for site in described.values()}
    absent = [site for site in before.sites if site.name not in here] if before else []
    sites = [*absent, *described.values()]
    roster = agree(run, sites, classes=classes, shape=image_shape(config), unseen=unseen)
    roster.starts = before.starts + 1 if before else 1
    silent = {enrolment.name_of(node): reason for node, reason in failed.items()}
    roster.sitting_out |= silent
    for name, reason in roster.sitting_out.items():
        observer.note(f"The site {name if name in silent else repr(name)} sits out: {reason}.")
    roster.refuse_empty()
    nodes: dict[str, int] = {}
    for node, site in described.items():
        if site.name in roster and roster[site.name] == site:
            nodes.setdefault(site.name, node)
    strangers = {*described, *failed} - set(nodes.values())
    carried = session(run, config, roster.classes)
    return FlowerExecutor(enrolment, roster, carried, config, observer.note, nodes, strangers, status)


def prepare_network(config: Config, network: FlowerExecutor, directory: Path, model: nn.Module | None) -> NetworkSetup:
    """As `prepare`, of what the sites told; the first files of the run."""
    roster, status = network.roster, network.status
    setup = prepare(config.replace(executor="serial"), federation=roster.outline(), model=model)
    if config.weights and setup.worker.layout.local:
        raise MethodError(
            f"'{config.method}' keeps layers at the sites, and these cannot start from '{config.weights}', "
            "which only the server has: leave 'weights' out."
        )
    roster.save(directory)
    if config.dp == "central":
        # Every site is told the seed: what the server draws of its own must not follow from it.
        setup = replace(setup, rules=privacy.choose_rules(config, secret=True))
    for site in roster.sites:
        here = site.name in network.nodes
        status.set(site.name, "connected" if here else "not connected", connected=here)
    for name, reason in roster.sitting_out.items():
        status.set(name, f"sits out: {reason}")
    status.save()
    return NetworkSetup(config, setup.worker, setup.given, "flower", setup.rules, network=network)


def session(run: str, config: Config, classes: tuple[str, ...] | None) -> Table:
    """What every request carries, so that a site needs to remember nothing of earlier ones."""
    return {
        "run": run,
        "version": fedkeel.__version__,
        "config": config.to_dict(),
        "classes": None if classes is None else list(classes),
    }
