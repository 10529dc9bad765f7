"""Before training, and whenever a node appears: who is there, and what they say of themselves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from fedkeel.config import Config
from fedkeel.core.messages import BadMessage, reading
from fedkeel.engine.executors.flower.limits import largest_reply
from fedkeel.engine.executors.flower.roster import Description, Roster, agree
from fedkeel.stopping import Stopped, stop_requested

Table = dict[str, Any]
Reply = tuple[Table, bytes]
T = TypeVar("T")
POLL = 0.5
NEWCOMERS, PATIENCE = 30.0, 120.0  # for a site to say who it is: in the midst of a run, and before it
AWAY = "it is not connected"
SILENT = "it did not say in time who it is"


class Channel(Protocol):
    """What carries requests to nodes and their replies back."""

    def nodes(self) -> list[int]:
        """Those that can be reached at the moment."""
        ...

    def exchange(
        self, requests: Mapping[int, Table], message: bytes, timeout: float
    ) -> Iterator[tuple[int, Reply | str]]:
        """A request for each node, all with the same message. Replies, or what went wrong, as they come; a node that
        does not reply in time has none. A reply that is larger than `largest_reply` need not be fetched."""
        ...


def gather(
    channel: Channel,
    session: Table,
    config: Config,
    *,
    wanted: Callable[[], int],
    wait: float,
    owners: Mapping[int, str] | None,
    note: Callable[[str], None],
) -> tuple[dict[int, Description], dict[int, str]]:
    """Wait for `wanted` sites and hear what they say of themselves; and those of whom nothing could be learnt."""
    deadline = time.monotonic() + wait
    note(f"Waiting for {wanted()} sites.")
    found: dict[int, Description] = {}
    failed: dict[int, str] = {}
    while len(found) + len(failed) < wanted() and (time.monotonic() < deadline or len(found) < config.min_clients):
        new = [node for node in channel.nodes() if node not in found and node not in failed]
        for node, answer in describe(channel, new, session, owners, min(config.round_timeout, PATIENCE)).items():
            if isinstance(answer, Description):
                found[node] = answer
                note(f"The site '{answer.name}' is connected, {len(found)} of {wanted()}.")
            elif answer not in (SILENT, AWAY):
                failed[node] = answer
        if not new:
            pause(POLL)
    return found, failed


def describe(
    channel: Channel, nodes: Iterable[int], session: Table, owners: Mapping[int, str] | None, timeout: float
) -> dict[int, Description | str]:
    """Each node's description, or what is wrong with it."""
    found: dict[int, Description | str] = dict.fromkeys(nodes, SILENT)
    request = {"do": "describe", "session": session}
    for node, reply in channel.exchange(dict.fromkeys(found, request), b"", timeout):

        def read(table: Table, _: bytes, node: int = node) -> Description:
            site = Description.read(table.get("description"))
            if owners is not None and owners.get(node) != site.name:
                raise BadMessage(f"it calls itself '{site.name}', and its key is not that site's")
            return site

        try:
            found[node] = understood(reply, read, largest_reply(0))
        except BadMessage as bad:
            found[node] = str(bad)
    return found


def understood(reply: Reply | str, read: Callable[[Table, bytes], T], most: int) -> T:
    """What a reply says; `BadMessage` for whatever else came of it: what breaks is this reply, never the server."""
    if isinstance(reply, str):
        raise BadMessage(reply)
    table, data = reply
    if len(data) > most:
        raise BadMessage(f"its reply has {len(data):,} bytes, more than {most:,}")
    with reading():
        if "failure" in table:
            raise BadMessage(plain(table["failure"]))
        return read(table, data)


def join(first: Roster | None, run: str, described: Iterable[Description], **rules: Any) -> Roster:
    """The roster of a run, of those that are here and, when it goes on, of those that took part before."""
    here = list(described)
    if first is None:
        return agree(run, here, **rules)
    known = [site for site in first.sites if site.name not in {other.name for other in here}]
    return agree(first.run, [*known, *here], **{**rules, "classes": first.classes})


def name_of(node: int, owners: Mapping[int, str] | None) -> str:
    name = owners.get(node) if owners is not None else None
    return f"'{name}'" if name is not None else f"at node {node}"


def plain(given: object) -> str:
    """A site's own words, as one line that does no harm in a log."""
    return "".join(c for c in str(given)[:500] if c.isprintable()) or "it does not say why"


def pause(seconds: float) -> None:
    """Wait, but not when the run is asked to stop."""
    if stop_requested.wait(seconds):
        raise Stopped
