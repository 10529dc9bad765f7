"""The server's port in this process: its guards, uvicorn as the server runs it, and an app behind them."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn

from fedkeel.deploy.clock import Differences
from fedkeel.deploy.connections import UVICORN, ConnectionGuard, listen
from fedkeel.deploy.superlink import RequestGuard

SECONDS = 60.0  # until a test gives up; nothing takes them


class Timer:
    def __init__(self, timers: Timers, seconds: float, act: Callable[[], None]) -> None:
        self.timers, self.seconds, self.act = timers, seconds, act

    def cancel(self) -> None:
        self.timers.pending.discard(self)


class Timers:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.pending: set[Timer] = set()

    def later(self, seconds: float, act: Callable[[], None]) -> Timer:
        timer = Timer(self, seconds, act)
        self.pending.add(timer)
        return timer

    def pass_(self) -> None:
        for timer in list(self.pending):
            timer.act()
        self.pending.clear()

    @property
    def seconds(self) -> list[float]:
        return sorted(timer.seconds for timer in list(self.pending))


class Served:
    """`app` answers behind the middleware; `files` are those of a TLS server."""

    def __init__(self, app: Any, *, keys: Any = None, files: Any = None, **limits: Any) -> None:
        self.timers = Timers()
        self.connections = ConnectionGuard(call_later=self.timers.later, **limits)
        self.inner = app
        self.differences = Differences(Path("/nowhere/clocks.json"))
        self._listener = listen("127.0.0.1", 0, self.connections)
        self.port = int(self._listener.getsockname()[1])
        node = SimpleNamespace(get_node_id_by_public_key=lambda key: 7 if key in (keys or ()) else None)
        factory = SimpleNamespace(state=lambda: node)
        self.state = SimpleNamespace(enable_supernode_auth=keys is not None, linkstate_factory=factory)
        guarded = RequestGuard(self, b"secret", self.connections, self.differences)
        tls = {"ssl_certfile": files.certificate, "ssl_keyfile": files.key} if files else {}
        given = {"lifespan": "off", "log_config": None, "timeout_keep_alive": int(SECONDS), **tls, **UVICORN}
        self._server = uvicorn.Server(uvicorn.Config(guarded, **given))
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)
        self._open: list[socket.socket] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.inner(scope, receive, send)

    def __enter__(self) -> Served:
        self._thread.start()
        self.until(lambda: self._server.started)
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._open:
            connection.close()
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(SECONDS)
        self._listener.close()

    def until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not happened():
            assert time.monotonic() < deadline, "it did not happen"
            time.sleep(0.005)

    def connect(self, *, source: str = "127.0.0.1", ca: Path | None = None) -> socket.socket:
        """A connection that the server knows of."""
        before = set(self.connections._open)
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=SECONDS, source_address=(source, 0))
        self._open.append(connection)
        own = connection.getsockname()
        self.until(lambda: own in self.connections._open or own in before)
        if ca is not None:
            connection = ssl.create_default_context(cafile=str(ca)).wrap_socket(connection, server_hostname="localhost")
            self._open.append(connection)
        return connection


def request(path: str = "/v1/fleet/x", body: int = 0, **headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: here", f"Content-Length: {body}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def status_of(connection: socket.socket) -> int:
    """Reads a whole answer without a body, or with one that is not looked at."""
    head = b""
    while b"\r\n\r\n" not in head:
        piece = connection.recv(4096)
        assert piece, "it was closed"
        head += piece
    return int(head.split()[1])


def is_closed(connection: socket.socket) -> bool:
    """Waits for the other end to close, whatever it says before."""
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True
