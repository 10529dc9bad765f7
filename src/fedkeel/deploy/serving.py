"""A run over a network: wait for the sites, agree with them, then the ordinary round loop."""

import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

import fedkeel
from fedkeel import spec
from fedkeel.config import Config
from fedkeel.core.composition import Composition
from fedkeel.data.readers.folder import Folder
from fedkeel.data.site import image_shape, reading
from fedkeel.engine.checks import check_training
from fedkeel.engine.executors.executor import Executor
from fedkeel.engine.executors.sites.channel import TELL, Channel, Table, wait
from fedkeel.engine.executors.sites.executor import Show, SitesExecutor
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
        return "sites" if self.config.dp == "local" else super().noise_from()

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
    directory = Path(out) if out else free_directory(config)
    if begun(config, directory):
        if Run(directory).finished:
            return Run(directory)
        store, before = Store.open(directory), Roster.load(directory)
    else:
        refuse_to_hide(directory)
        store, before = Store.create(directory, config), None
    live = Live(directory, observer or Observer())  # who waits for sites watches this, too
    try:
        show = board(live)
        roster = enrol(channel, config, before, waiting or Waiting(), live, show)
        setup = prepare_network(channel, config, roster, live, show, model)
        roster.save(directory)
    except BaseException as error:
        live.end(str(error) if isinstance(error, FedkeelError) else STOPPED)
        if isinstance(error, FedkeelError) and store.is_blank:
            store.discard()
        store.close()
        raise
    return finish(store, setup, live)


def board(live: Live) -> Show:
    """What each site last did, for whoever watches the run."""
    sites: dict[str, Table] = {}

    def show(names: Collection[str], what: str, connected: bool) -> None:
        at = time.strftime("%Y-%m-%d %H:%M:%S")
        sites.update({name: {"state": what, "connected": connected, "at": at} for name in names})
        live.set(sites=sites)

    return show


def enrol(channel: Channel, config: Config, before: Roster | None, waiting: Waiting, live: Live, show: Show) -> Roster:
    """Who takes part, of those that are here and, when a run goes on, of those that took part before."""
    run, earlier = (before.run, before.sites) if before else (secrets.token_hex(8), [])
    show([*waiting.named, *(site.name for site in earlier)], "not connected", False)
    answers = meet(channel, session(run, config, None), config, waiting, live, show)
    described = [site for site in answers.values() if isinstance(site, Description)]
    options = spec.parse(config.data).options
    classes = before.classes if before else names(options["classes"]) if "classes" in options else None
    unseen = [*names(config.unseen), *names(options.get("unseen", ()))]
    absent = [site for site in earlier if site.name not in {site.name for site in described}]
    roster = agree(run, [*absent, *described], classes=classes, shape=image_shape(config), unseen=unseen)
    roster.starts = before.starts + 1 if before else 1
    roster.sitting_out |= {name: reason for name, reason in answers.items() if isinstance(reason, str)}
    told = {name: {"do": "sit out", "reason": why} for name, why in roster.sitting_out.items() if name in answers}
    roster.sitting_out |= {name: "it did not come" for name in waiting.named if name not in answers}
    for name, reason in roster.sitting_out.items():
        live.note(f"The site '{name}' sits out: {reason}.")
        show([name], f"sits out: {reason}", name in answers)
    for _ in channel.exchange(told, b"", TELL) if told else ():
        """Whatever they reply: they are told, so that nobody there waits in the dark."""
    roster.refuse_empty()
    if len(roster.sites[0].shape) == 3:  # of an image before its transform
        size = reading(config).get("size", Folder.size)
        roster.stored, roster.transform = (3, size, size), str(options.get("test_transform", Folder.transforms[1]))
    return roster


def meet(
    channel: Channel, opening: Table, config: Config, waiting: Waiting, live: Live, show: Show
) -> dict[str, Description | str]:
    """What the sites say of themselves, as they come, until all have come or the waiting is over."""
    wanted = waiting.sites or len(waiting.named) or config.min_clients
    answers: dict[str, Description | str] = {}

    def absent(wanted: int) -> str:
        new = [name for name in channel.sites() if name not in answers]
        answers.update(describe(channel, new, opening, min(config.round_timeout, PATIENCE)) if new else {})
        show(new, "connected", True)
        named = ", ".join(name for name in waiting.named if name not in answers) or "more"
        return f"{len(answers)} of {wanted} sites are here, waiting for {named}." if len(answers) < wanted else ""

    wait(lambda: absent(wanted), live.note, waiting.seconds)
    wait(lambda: absent(min(wanted, config.min_clients)), live.note, float("inf"))
    return answers


def prepare_network(
    channel: Channel, config: Config, roster: Roster, live: Live, show: Show, model: nn.Module | None
) -> NetworkSetup:
    """As `prepare`, of what the sites told."""
    setup = prepare(config.replace(executor="serial"), federation=roster.outline(), model=model)
    if config.weights and setup.worker.layout.local:
        raise MethodError(
            f"'{config.method}' keeps layers at the sites, and these cannot start from '{config.weights}', "
            "which only the server has: leave 'weights' out."
        )
    # Every site is told the seed: what the server draws of its own must not follow from it.
    rules = privacy.choose_rules(config, secret=True) if config.dp == "central" else setup.rules
    opening = session(roster.run, config, roster.classes)
    network = SitesExecutor(channel, roster, opening, config, live.note, show)
    return NetworkSetup(config, setup.worker, setup.given, "sites", rules, network=network)


def session(run: str, config: Config, classes: tuple[str, ...] | None) -> Table:
    """What every request carries, so that a site needs to remember nothing of earlier ones."""
    labels = None if classes is None else list(classes)
    return {"run": run, "version": fedkeel.__version__, "config": config.to_dict(), "classes": labels}
