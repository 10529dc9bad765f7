"""What carries requests to sites and their replies back, and how a reply is read."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from fedkeel.core.messages import BadMessage, reading
from fedkeel.stopping import Stopped, stop_requested

Table = dict[str, Any]
Reply = tuple[Table, bytes]
LARGEST_TABLE = 4 * 2**20
STEPS = 1000  # requests of a round: a step of a run is `round * STEPS` and the number of the request
POLL, TELL = 0.5, 10.0  # seconds between two looks at who is there, and between two words about who is not


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


def unpacked(text: object, message: object) -> Reply:
    """A table and a message as they came; `BadMessage` for anything else."""
    if not isinstance(text, str) or not isinstance(message, bytes) or len(text) > LARGEST_TABLE:
        raise BadMessage(f"it is not a table of {LARGEST_TABLE:,} letters at most and a message")
    with reading():
        table = json.loads(text)
    if not isinstance(table, dict):
        raise BadMessage("its table is none")
    return table, message


@contextmanager
def read_reply(reply: Reply | str, most: int) -> Iterator[Reply]:
    """For a block that reads it: whatever goes wrong there is a `BadMessage`, and never breaks the server."""
    with reading():
        if isinstance(reply, str):
            raise BadMessage(reply)
        table, data = reply
        if len(data) > most:
            raise BadMessage(f"its reply has {len(data):,} bytes, more than {most:,}")
        if "failure" in table:
            raise BadMessage(plain(table["failure"]))
        yield table, data


def plain(given: object) -> str:
    """A stranger's own words, as one line that does no harm in a log."""
    return "".join(c for c in str(given)[:500] if c.isprintable()) or "it does not say why"


def wait(absent: Callable[[], str], say: Callable[[str], None], seconds: float, poll: float = POLL) -> None:
    """Until nobody is absent, or for so many seconds; whom it waits for is said at once and then every ten seconds."""
    began = told = time.monotonic()
    while sentence := absent():
        now = time.monotonic()
        if now - began > seconds:
            return
        if now >= told:
            say(sentence)
            told = now + TELL
        if stop_requested.wait(poll):
            raise Stopped
