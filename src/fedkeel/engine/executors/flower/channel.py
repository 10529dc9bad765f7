"""What carries requests to sites and their replies back, how large they may be, and how a reply is read."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from fedkeel.core.messages import BadMessage, reading
from fedkeel.stopping import Stopped, stop_requested

Table = dict[str, Any]
Reply = tuple[Table, bytes]
T = TypeVar("T")
POLL = 0.5  # seconds
AWAY = "it is not connected"


def next_look(waited: float, most: float = POLL) -> float:
    """Seconds until one looks again for what was waited for so long: so that looking late costs a twentieth more."""
    return min(most, 0.02 + waited / 20)


def largest_reply(sent: int) -> int:
    """Bytes that a reply may have: an update is as large as the broadcast it answers, with a method's extras."""
    return 8 * sent + 4 * 2**20


class Channel(Protocol):
    def nodes(self) -> list[int]:
        """Those that can be reached at the moment."""
        ...

    def exchange(
        self, requests: Mapping[int, Table], message: bytes, timeout: float
    ) -> Iterator[tuple[int, Reply | str]]:
        """A request for each node, all with the same message. Replies, or what went wrong, as they come; a node that
        does not reply in time has none. A reply that is larger than `largest_reply` need not be fetched."""
        ...


def read_reply(reply: Reply | str, read: Callable[[Table, bytes], T], most: int) -> T:
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


def plain(given: object) -> str:
    """A stranger's own words, as one line that does no harm in a log."""
    return "".join(c for c in str(given)[:500] if c.isprintable()) or "it does not say why"


def pause(seconds: float) -> None:
    """Wait, but not when the run is asked to stop."""
    if stop_requested.wait(seconds):
        raise Stopped
