"""What carries requests to sites and their replies back, and how a reply is read."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeVar

from fedkeel.core.messages import BadMessage, reading

Table = dict[str, Any]
Reply = tuple[Table, bytes]
T = TypeVar("T")
AWAY = "it is not connected"


def largest_reply(sent: int) -> int:
    """Bytes that a reply may have: an update is as large as the broadcast it answers, with a method's extras."""
    return 8 * sent + 4 * 2**20


class Channel(Protocol):
    """NVFlare's is `deploy.channel`, Flower's `deploy.flower`; tests have one that is a function call."""

    def sites(self) -> list[str]:
        """The names of those that can be reached at the moment. A site cannot choose its own."""
        ...

    def exchange(
        self, requests: Mapping[str, Table], message: bytes, timeout: float
    ) -> Iterator[tuple[str, Reply | str]]:
        """A request for each site, all with the same message. Replies, or what went wrong, as they come; a site that
        does not reply in time has none."""
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
