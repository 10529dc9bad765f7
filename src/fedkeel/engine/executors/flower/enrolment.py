"""Before training, and whenever a node appears: who is there, and what they say of themselves."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fedkeel.config import Config
from fedkeel.core.messages import BadMessage
from fedkeel.engine.executors.flower.channel import AWAY, POLL, Channel, Table, largest_reply, pause, read_reply
from fedkeel.engine.executors.flower.roster import Description

PATIENCE = 120.0  # seconds, for a site to say who it is
SILENT = "it did not say in time who it is"


@dataclass(frozen=True)
class Enrolment:
    """Which sites a run waits for, and who they are.

    Attributes:
        sites: how many to wait for; 0 for as many as there are keys, or `min_clients`.
        wait: seconds after which to begin with fewer, if they are at least `min_clients`.
        owners: which site each node's key was made for: a node cannot pose as another site; None without keys.
    """

    channel: Channel
    sites: int = 0
    wait: float = 600
    owners: Mapping[int, str] | None = None

    def wait_for_sites(
        self, session: Table, config: Config, note: Callable[[str], None]
    ) -> tuple[dict[int, Description], dict[int, str]]:
        """What the sites say of themselves, and those of whom nothing could be learnt."""

        def wanted() -> int:  # keys may come while it waits
            return self.sites or len(self.owners or ()) or config.min_clients

        deadline = time.monotonic() + self.wait
        note(f"Waiting for {wanted()} sites.")
        found: dict[int, Description] = {}
        failed: dict[int, str] = {}
        while len(found) + len(failed) < wanted() and (time.monotonic() < deadline or len(found) < config.min_clients):
            new = [node for node in self.channel.nodes() if node not in found and node not in failed]
            for node, answer in self.describe(new, session, min(config.round_timeout, PATIENCE)).items():
                if isinstance(answer, Description):
                    found[node] = answer
                    note(f"The site '{answer.name}' is connected, {len(found)} of {wanted()}.")
                elif answer not in (SILENT, AWAY):
                    failed[node] = answer
            if not new:
                pause(POLL)
        return found, failed

    def describe(self, nodes: Iterable[int], session: Table, timeout: float) -> dict[int, Description | str]:
        """Each node's description, or what is wrong with it."""
        found: dict[int, Description | str] = dict.fromkeys(nodes, SILENT)
        request = {"do": "describe", "session": session}
        for node, reply in self.channel.exchange(dict.fromkeys(found, request), b"", timeout):
            try:
                site = read_reply(reply, lambda table, _: Description.read(table.get("description")), largest_reply(0))
            except BadMessage as bad:
                found[node] = str(bad)
                continue
            if self.owners is None or self.owners.get(node) == site.name:
                found[node] = site
            else:
                found[node] = f"it calls itself '{site.name}', and its key is not that site's"
        return found

    def name_of(self, node: int) -> str:
        name = self.owners.get(node) if self.owners is not None else None
        return f"'{name}'" if name is not None else f"at node {node}"
