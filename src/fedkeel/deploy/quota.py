"""How much a site may send: one reply at a time in the store of Flower's process, and no larger than a reply may be.

Flower stores whatever a node with a key sends, before anyone looks at it, and deletes a reply when it was fetched. One
that is too large, comes too late or is never complete would lie there until the end of the run.
"""

import threading
import time
from dataclasses import dataclass

from fedkeel.engine.executors.flower.channel import largest_reply

LARGEST = 16 * 2**20  # bytes of one request: Flower cuts what is larger than 5 MiB into pieces
UNDER_WAY = 4 * LARGEST  # of the requests of one site that are not answered yet; Flower sends two pieces at a time


def most_pieces(sent: int) -> int:
    """Into how many pieces a reply may be cut."""
    return 64 + largest_reply(sent) // 2**20


class OverQuota(Exception):
    """A reply, or a piece of one, that the store does not take. `reply` is what is to be deleted of it."""

    def __init__(self, reason: str, reply: str = "") -> None:
        super().__init__(reason)
        self.reply = reply


@dataclass
class StoredReply:
    reply: str
    session: str
    bytes: int = 0


class Quota:
    """Counts what each site has in the store, and allows as much as follows from what the server itself sends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stored: dict[int, StoredReply] = {}
        self._session, self._in_session, self._sent = "", 0, 0

    def sent(self, session: str, size: int) -> None:
        """The server sends so many bytes more; what it sends at once to all sites is one session."""
        with self._lock:
            self._in_session = size + (self._in_session if session == self._session else 0)
            self._session, self._sent = session, max(self._sent, self._in_session)

    def check(self, node: int, sender: int, reply: str, root: str, pieces: int) -> str:
        """Before a reply is announced to the store. Returns the earlier one of this site that is there, or nothing."""
        if sender != node:
            raise OverQuota(f"Node {node} replies in the name of node {sender}.")
        if root != reply:
            raise OverQuota(f"The reply of node {node} announces the pieces of something else.")
        if pieces > most_pieces(self._sent):
            raise OverQuota(f"The reply of node {node} has {pieces:,} pieces, more than {most_pieces(self._sent):,}.")
        with self._lock:
            known = self._stored.get(node)
            return known.reply if known is not None and known.reply != reply else ""

    def announced(self, node: int, reply: str, session: str) -> None:
        """The reply is announced, or announced again."""
        with self._lock:
            known = self._stored.get(node)
            so_far = known.bytes if known is not None and known.reply == reply else 0
            self._stored[node] = StoredReply(reply, session, so_far)

    def take(self, node: int, session: str, size: int) -> None:
        """Before a piece of a reply is stored."""
        with self._lock:
            known = self._stored.get(node)
            if known is None or known.session != session:
                raise OverQuota(f"A piece of node {node} belongs to no reply of it.")
            known.bytes += size
            most = largest_reply(self._sent) + LARGEST
            if known.bytes > most:
                raise OverQuota(f"The reply of node {node} has more than {most:,} bytes.", known.reply)


class ReplyMeter:
    """Gives up on a reply that is too large, or not complete in time, while it is fetched."""

    def __init__(self, most: int, deadline: float) -> None:
        self._most, self._deadline = most, deadline
        self._bytes, self._lock = 0, threading.Lock()
        self.refusal = ""

    def take(self, size: int, found: bool, available: bool) -> str:
        """A piece, which Flower's process has, or may still get; returns why the reply is given up, or nothing."""
        with self._lock:
            self._bytes += size
            if self._bytes > self._most:
                self.refusal = f"its reply has more than {self._most:,} bytes"
            elif not found:  # what is far too large, Flower's process did not even keep
                self.refusal = self.refusal or f"its reply is cut off: it may have {self._most:,} bytes"
            elif not available and time.monotonic() > self._deadline:
                self.refusal = "its reply was not complete in time"
            return self.refusal
