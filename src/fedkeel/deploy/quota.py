"""How much a site may send: one reply at a time in the store of Flower's process, and no larger than a reply may be.

Flower stores whatever a node with a key sends, before anyone looks at it, and deletes a reply when it was fetched. One
that is too large, comes too late or is never complete would lie there until the end of the run.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import HTTPException

from fedkeel.engine.executors.flower.channel import largest_reply

LARGEST = 16 * 2**20  # bytes of one request: Flower cuts what is larger than 5 MiB into pieces
UNDER_WAY = 4 * LARGEST  # of the requests of one site that are not answered yet; Flower sends two pieces at a time


def most_pieces(sent: int) -> int:
    """Into how many pieces a reply may be cut."""
    return 64 + largest_reply(sent) // 2**20


def over(reason: str) -> HTTPException:
    """What a site is answered whose reply, or piece of one, the store does not take."""
    return HTTPException(413, reason)


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
            raise over(f"Node {node} replies in the name of node {sender}.")
        if root != reply:
            raise over(f"The reply of node {node} announces the pieces of something else.")
        if pieces > most_pieces(self._sent):
            raise over(f"The reply of node {node} has {pieces:,} pieces, more than {most_pieces(self._sent):,}.")
        with self._lock:
            known = self._stored.get(node)
            return known.reply if known is not None and known.reply != reply else ""

    def announced(self, node: int, reply: str, session: str) -> None:
        """The reply is announced, or announced again."""
        with self._lock:
            known = self._stored.get(node)
            so_far = known.bytes if known is not None and known.reply == reply else 0
            self._stored[node] = StoredReply(reply, session, so_far)

    def take(self, node: int, session: str, size: int, delete: Callable[[str], None]) -> None:
        """Before a piece of a reply is stored; one of too many takes with it what is there of the reply."""
        with self._lock:
            known = self._stored.get(node)
            if known is None or known.session != session:
                raise over(f"A piece of node {node} belongs to no reply of it.")
            known.bytes += size
            most = largest_reply(self._sent) + LARGEST
        if known.bytes > most:
            delete(known.reply)
            raise over(f"The reply of node {node} has more than {most:,} bytes.")
