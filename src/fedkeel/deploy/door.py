"""The port of the server: who may stay connected, and for how long without saying anything.

A connection costs a stranger nothing and the server one of a few thousand descriptors. So a request has to begin, and
its body to go on, within some seconds; whoever has not shown a key yet makes room for those who come after, first where
most such connections come from; and a site has only so many. Who waits for an answer is never hurried.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

HEADERS = 15.0  # seconds from connecting, or from the last answer, to the end of a request's headers, TLS included
BODY = 60.0  # seconds from one piece of a request's body to the next
UNREAD = 120.0  # seconds that an answer, or a machine that is gone, may leave what was sent unacknowledged
STRANGERS = 256  # connections that have shown no key
OF_A_SITE = 64
DESCRIPTORS = 2**16
BACKLOG = 128

Peer = tuple[str, int]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Later = Callable[[float, Callable[[], None]], Any]


@dataclass(eq=False)
class Guest:
    """One connection. `group` is the address it came from or, once it has shown one, its key."""

    connection: socket.socket
    group: str | bytes
    timer: Any = None

    def shut(self) -> None:
        """Both ends see that it is over; whoever reads from it closes it."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def later(seconds: float, act: Callable[[], None]) -> Any:
    return asyncio.get_running_loop().call_later(seconds, act)


class Door:
    """Keeps account of connections, by the address and port of the other end."""

    def __init__(
        self, *, strangers: int = STRANGERS, of_a_site: int = OF_A_SITE, headers: float = HEADERS, body: float = BODY,
        later: Later = later,
    ) -> None:  # fmt: skip
        self._strangers, self._of_a_site = strangers, of_a_site
        self._headers, self._body, self._later = headers, body, later
        self._guests: dict[Peer, Guest] = {}

    def came(self, connection: socket.socket, peer: Peer) -> None:
        self._guests = {known: guest for known, guest in self._guests.items() if guest.connection.fileno() >= 0}
        self._guests[peer] = guest = Guest(connection, peer[0])
        self._hurry(guest, self._headers)
        groups: dict[str, list[Peer]] = defaultdict(list)
        for known, other in self._guests.items():
            if isinstance(other.group, str):
                groups[other.group].append(known)
        if sum(map(len, groups.values())) > self._strangers:
            self._send_away(max(groups.values(), key=len))

    def showed(self, peer: Peer | None, key: bytes) -> None:
        """It has the key of a site; an empty one where there are none, or where it is the server itself."""
        guest = self._guests.get(peer) if peer else None
        if guest is None or guest.group == key:
            return
        guest.group = key
        own = [known for known, other in self._guests.items() if other.group == key]
        if key and len(own) > self._of_a_site:
            self._send_away([known for known in own if known != peer])

    def heard(self, peer: Peer | None) -> None:
        """A request has begun: from now on it is the server that is waited for."""
        guest = self._guests.get(peer) if peer else None
        if guest is not None and guest.timer is not None:
            guest.timer.cancel()
            guest.timer = None

    def awaits(self, peer: Peer | None) -> None:
        """It was answered, and may ask again."""
        if peer in self._guests:
            self._hurry(self._guests[peer], self._headers)

    def hurrying(self, peer: Peer | None, receive: Receive) -> Receive:
        """The same, where each piece of a body has to come in time."""
        ended = False

        async def patient() -> dict[str, Any]:
            nonlocal ended
            guest = self._guests.get(peer) if peer else None
            if guest is None or ended:
                return await receive()
            self._hurry(guest, self._body)
            try:
                message = await receive()
            finally:
                self.heard(peer)
            ended = not message.get("more_body", False)
            return message

        return patient

    def _hurry(self, guest: Guest, seconds: float) -> None:
        if guest.timer is not None:
            guest.timer.cancel()
        guest.timer = self._later(seconds, guest.shut)

    def _send_away(self, peers: list[Peer]) -> None:
        """The one of these that came first, if possible one that waits for nothing."""
        idle = [peer for peer in peers if self._guests[peer].timer is not None]
        guest = self._guests.pop((idle or peers)[0])
        if guest.timer is not None:
            guest.timer.cancel()
        guest.shut()


class Listener(socket.socket):
    """A listening socket that tells the door of everyone who comes, also before TLS has begun."""

    door: Door

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD))
        self.door.came(connection, address[:2])
        return connection, address


def listen(host: str, port: int, door: Door) -> Listener:
    listener = Listener(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.door = door
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def raise_limit() -> None:
    """As many descriptors as this process may have; often the first thousand are a default, and not the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# What does not need to be guessed or proxied: addresses are those of the connections themselves.
UVICORN: dict[str, Any] = {
    "loop": "asyncio",  # whose server takes its connections from the listener's `accept`
    "http": "h11",
    "ws": "none",
    "proxy_headers": False,
    "forwarded_allow_ips": "",
    "server_header": False,
    "backlog": BACKLOG,
    "h11_max_incomplete_event_size": 2**15,
}
