"""A run over a network: gather the sites, agree with them, then the ordinary round loop."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fedkeel
from fedkeel import spec
from fedkeel.config import Config
from fedkeel.core.composition import Composition
from fedkeel.data.federation import Federation
from fedkeel.data.site import image_shape
from fedkeel.engine.executors.executor import Executor
from fedkeel.engine.executors.flower.executor import FlowerExecutor, Status
from fedkeel.engine.executors.flower.gathering import Channel, Table, gather, join, name_of
from fedkeel.engine.executors.flower.roster import Roster, refuse_empty
from fedkeel.engine.memory import ClientMemory
from fedkeel.engine.memory_files import MemoryFiles
from fedkeel.engine.setup import Setup, prepare
from fedkeel.errors import FedkeelError, MethodError
from fedkeel.methods import build as build_method
from fedkeel.observer import Observer
from fedkeel.runs.run import Run
from fedkeel.runs.store import Store, fingerprint, read_config
from fedkeel.simulation import finish, free_directory
from fedkeel.spec import names
from fedkeel.trust import privacy
from fedkeel.trust.robust import Defence
from fedkeel.trust.secrets import FILE, Randomness, kept_in

log = logging.getLogger("fedkeel")


@dataclass
class NetworkSetup(Setup):
    """A run whose clients are at other machines."""

    channel: FlowerExecutor | None = None

    def executor(self, files: MemoryFiles | None = None) -> Executor:
        assert self.channel is not None
        self.channel.memory = ClientMemory(self.config.stateless, files=files)
        return self.channel

    def grown(self) -> Federation | None:
        assert self.channel is not None
        return self.channel.roster.outline() if self.channel.welcome() else None

    def noise_from(self) -> str:
        assert self.channel is not None
        # The nodes of a simulation, which have positions, draw from what one process would.
        apart = self.config.dp == "local" and all(site.position is None for site in self.channel.roster.sites)
        return "sites" if apart else self.rules.randomness.source


def check(config: Config) -> None:
    """What can be refused before any site is waited for."""
    method = Composition.of(build_method(config.method))
    if method.is_pooled:
        raise MethodError(f"'{method.name}' pools the data of all clients, which over a network stay where they are.")
    Defence.of(config.robust).refuse_what_it_cannot_protect(method)
    privacy.refuse_contradictions(config, method)
    if config.record:
        raise FedkeelError(
            f"'record' is '{config.record}', but diagnostics look at images, which stay at the sites: leave it out."
        )


def carry_out(
    channel: Channel,
    config: Config,
    *,
    out: str | Path | None = None,
    sites: int = 0,
    wait: float = 600,
    owners: Mapping[int, str] | None = None,
    observer: Observer | None = None,
    **objects: Any,
) -> Run:
    """Train over the sites that the channel reaches; a run directory that holds a run is resumed.

    Args:
        sites: how many to wait for; 0 for as many as there are keys, or `min_clients`.
        wait: seconds after which to begin with fewer, if they are at least `min_clients`.
        owners: which site each node's key was made for; None without keys.
    """
    check(config)
    config = config.replace(checkpoint_every=config.checkpoint_every or 1)  # sites keep as many rounds as may be undone
    observer = observer or Observer()
    directory = Path(out) if out else free_directory(config)
    if (directory / "config.toml").exists():
        stored = read_config(directory)
        if fingerprint(stored) != fingerprint(config):
            raise FedkeelError(
                f"'{directory}' holds a run of another configuration: resume it with its own config.toml, "
                "or choose another directory."
            )
        run = Run(directory)
        if run.finished:
            return run
        store, before = Store.open(directory), Roster.load(directory)
    else:
        store, before = Store.create(directory, config), None
    try:
        roster, nodes, strangers = settle(channel, config, before, sites, wait, owners, observer)
        roster.starts = before.starts + 1 if before else 1
        setup = prepare(config.replace(executor="serial", profile=False), federation=roster.outline(), **objects)
        if config.weights and setup.worker.layout.local:
            raise MethodError(
                f"'{config.method}' keeps layers at the sites, and these cannot start from '{config.weights}', "
                "which only the server has: leave 'weights' out."
            )
        roster.save(directory)
        if config.dp == "central":
            # Every site is told the seed: what the server draws of its own must not follow from it.
            setup.rules = privacy.choose_rules(config, setup.worker.method, Randomness(kept_in(directory / FILE)))
        status = Status(directory)
        for site in roster.sites:
            status.told(site.name, "connected" if site.name in nodes else "not connected", connected=site.name in nodes)
        for name, reason in roster.sitting_out.items():
            status.told(name, f"sits out: {reason}")
        status.save()
        executor = FlowerExecutor(
            channel,
            roster,
            session(roster.run, config, roster.classes),
            config,
            observer.note,
            owners,
            nodes,
            strangers,
            status,
        )
    except BaseException as error:
        if isinstance(error, FedkeelError) and store.is_blank:
            store.discard()
        store.close()
        raise
    network = NetworkSetup(
        config, setup.worker, setup.held_out, "flower", setup.rules, domains=setup.domains, channel=executor
    )
    run = finish(store, network, observer)
    (directory / FILE).unlink(missing_ok=True)  # nobody needs to draw this noise again
    return run


def settle(
    channel: Channel,
    config: Config,
    before: Roster | None,
    sites: int,
    wait: float,
    owners: Mapping[int, str] | None,
    observer: Observer,
) -> tuple[Roster, dict[str, int], set[int]]:
    """Who takes part, at which nodes they are, and the nodes of those who sit out."""
    run = before.run if before else secrets.token_hex(8)

    def wanted() -> int:
        return sites or len(owners or ()) or config.min_clients

    described, failed = gather(
        channel, session(run, config, None), config, wanted=wanted, wait=wait, owners=owners, note=observer.note
    )
    options = spec.parse(config.data).options
    fixed = names(options["classes"]) if "classes" in options else None
    unseen = [*names(config.unseen), *names(options.get("unseen", ()))]
    rules = {"classes": fixed, "shape": image_shape(config), "unseen": unseen}
    roster = join(before, run, described.values(), **rules)
    silent = {name_of(node, owners): reason for node, reason in failed.items()}
    roster.sitting_out |= silent
    for name, reason in roster.sitting_out.items():
        observer.note(f"The site {name if name in silent else repr(name)} sits out: {reason}.")
    refuse_empty(roster)
    nodes: dict[str, int] = {}
    for node, site in described.items():
        if site.name in roster and roster[site.name] == site:
            nodes.setdefault(site.name, node)
    return roster, nodes, {*described, *failed} - set(nodes.values())


def session(run: str, config: Config, classes: tuple[str, ...] | None) -> Table:
    """What every request carries, so that a site needs to remember nothing of earlier ones."""
    return {
        "run": run,
        "version": fedkeel.__version__,
        "config": config.to_dict(),
        "classes": None if classes is None else list(classes),
    }
