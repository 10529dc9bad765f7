"""Who may stay connected to the server's port, and for how long without saying anything.

A connection costs a stranger nothing and the server one of a few thousand descriptors. So a request has to begin, and
its body to go on, within some seconds; whoever has not shown a key yet makes room for those who come after, first where
most such connections come from; and a site has only so many. Who waits for an answer is never hurried.
"""

import asyncio
import hashlib
import hmac
import resource
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

SECRET = "fedkeel-secret"  # a header
HEADERS = 15.0  # seconds from connecting, or from the last answer, to the end of a request's headers, TLS included
BODY = 60.0  # seconds from one piece of a request's body to the next
UNREAD = 120.0  # seconds that an answer, or a machine that is gone, may leave what was sent unacknowledged
STRANGERS = 256  # connections that have shown no key
OF_A_SITE = 64
DESCRIPTORS = 2**16

# What does not need to be guessed or proxied: addresses are those of the connections themselves.
UVICORN: dict[str, Any] = {
    "loop": "asyncio",  # whose server takes its connections from the listener's `accept`
    "http": "h11",
    "ws": "none",
    "proxy_headers": False,
    "forwarded_allow_ips": "",
    "server_header": False,
    "backlog": 128,
    "h11_max_incomplete_event_size": 2**15,
}

Peer = tuple[str, int]
Receive = Callable[[], Awaitable[dict[str, Any]]]


def password(secret: bytes) -> str:
    """What to show in the header: of the secret that Fedkeel and its Flower process share, and not that itself, which
    Flower signs with."""
    return hmac.new(secret, b"fedkeel control and runtime", hashlib.sha256).hexdigest()


@dataclass(eq=False)
class Connection:
    """`group` is the address it came from or, once it has shown one, its key."""

    end: socket.socket
    group: str | bytes
    timer: Any = None

    def shut(self) -> None:
        """Both ends see that it is over; whoever reads from it closes it."""
        with suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


def call_later(seconds: float, act: Callable[[], None]) -> Any:
    return asyncio.get_running_loop().call_later(seconds, act)


class ConnectionGuard:
    """Counts connections, by the address and port of the other end, and closes those that take too long or too much."""

    def __init__(
        self, *, strangers: int = STRANGERS, of_a_site: int = OF_A_SITE, call_later: Callable[..., Any] = call_later
    ) -> None:
        self._strangers, self._of_a_site, self._call_later = strangers, of_a_site, call_later
        self._open: dict[Peer, Connection] = {}

    def connected(self, connection: socket.socket, peer: Peer) -> None:
        self._open = {known: other for known, other in self._open.items() if other.end.fileno() >= 0}
        self._open[peer] = Connection(connection, peer[0])
        self._limit_time(peer, HEADERS)
        groups: dict[str, list[Peer]] = defaultdict(list)
        for known, other in self._open.items():
            if isinstance(other.group, str):
                groups[other.group].append(known)
        if sum(map(len, groups.values())) > self._strangers:
            self._close_one(max(groups.values(), key=len))

    def authenticated(self, peer: Peer | None, key: bytes) -> None:
        """It has the key of a site; an empty one where there are none, or where it is the server itself."""
        connection = self._open.get(peer) if peer else None
        if connection is None or connection.group == key:
            return
        connection.group = key
        own = [known for known, other in self._open.items() if other.group == key]
        if key and len(own) > self._of_a_site:
            self._close_one([known for known in own if known != peer])

    def request_began(self, peer: Peer | None) -> None:
        """From now on it is the server that is waited for."""
        if peer in self._open:
            self._open[peer].stop_timer()

    def answered(self, peer: Peer | None) -> None:
        self._limit_time(peer, HEADERS)

    def timed(self, peer: Peer | None, receive: Receive) -> Receive:
        """The same `receive`, where each piece of a body has to come in time."""
        ended = False

        async def receive_in_time() -> dict[str, Any]:
            nonlocal ended
            if ended:
                return await receive()
            self._limit_time(peer, BODY)
            try:
                message = await receive()
            finally:
                self.request_began(peer)
            ended = not message.get("more_body", False)
            return message

        return receive_in_time

    def _limit_time(self, peer: Peer | None, seconds: float) -> None:
        if peer in self._open:
            connection = self._open[peer]
            connection.stop_timer()
            connection.timer = self._call_later(seconds, connection.shut)

    def _close_one(self, peers: list[Peer]) -> None:
        """The one of these that came first, if possible one that waits for nothing."""
        idle = [peer for peer in peers if self._open[peer].timer is not None]
        connection = self._open.pop((idle or peers)[0])
        connection.stop_timer()
        connection.shut()


class Listener(socket.socket):
    """A listening socket that tells the guard of everyone who connects, also before TLS has begun."""

    guard: ConnectionGuard

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD))
        self.guard.connected(connection, address[:2])
        return connection, address


def listen(host: str, port: int, guard: ConnectionGuard) -> Listener:
    listener = Listener(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    listener.guard = guard
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    return listener


def raise_descriptor_limit() -> None:
    """As many descriptors as this process may have; often the first thousand are a default, and not the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
