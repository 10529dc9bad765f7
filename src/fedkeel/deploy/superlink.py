"""Flower's SuperLink, closed to strangers, and with room for what sites have to say but no more.

SuperLink has one port for everything: for sites (the Fleet API), for whoever starts and stops runs (Control) and for
its own processes (Runtime). Node keys guard the first; the other two are open to anyone who can reach the port, and
whoever starts a run gives it code. Here these two answer only to who knows a secret that the server makes at its start
and keeps in a file of its own: where a request comes from is told by proxies, and everyone on a machine comes from it.
And Flower reads a request whole before it looks at the key: here the key comes first.
"""

import contextlib
import hmac
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import uvicorn
from starlette.concurrency import run_in_threadpool

from fedkeel.deploy import clock, flower_internals, flower_processes
from fedkeel.deploy.clock import Differences
from fedkeel.deploy.connections import SECRET, UVICORN, ConnectionGuard, listen, password, raise_descriptor_limit
from fedkeel.deploy.flower_internals import (
    FIRST_REQUEST,
    FOR_SITES,
    NEWEST,
    OLDEST,
    PULL,
    PULL_REPLIES,
    PUSH,
    PUSH_REPLY,
    SECRET_FILE,
    has_messages,
    has_replies,
    signer,
)
from fedkeel.deploy.flower_processes import NODE
from fedkeel.deploy.long_poll import HELD, LongPoll
from fedkeel.deploy.quota import LARGEST, UNDER_WAY, Quota

LONGEST_LOG = 32 * 2**20  # bytes
MOST_REPLIES = 10  # questions for replies that are kept


class RequestGuard:
    """Around Flower's ASGI app: who has a site's key may ask for what sites ask for, who has the server's secret for
    the rest. Nobody is read, or waited for, without end."""

    def __init__(
        self, app: Any, secret: bytes, connections: ConnectionGuard, differences: Differences, held: float = HELD
    ) -> None:
        self._app, self._password = app, password(secret).encode()
        self.is_closing = False
        self._to_sites = LongPoll(app, has_messages, held, is_closing=self._closes)
        self._to_server = LongPoll(app, has_replies, held, MOST_REPLIES, is_closing=self._closes)
        self._connections, self._differences = connections, differences
        self._under_way: Counter[bytes] = Counter()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        peer = scope.get("client")
        self._connections.request_began(peer)
        try:
            await self._answer(scope, self._connections.timed(peer, receive), send)
        finally:
            self._connections.answered(peer)

    async def _answer(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        headers = dict(scope.get("headers", ()))
        for_sites = scope.get("path", "").startswith(FOR_SITES)
        length = headers.get(b"content-length", b"0")
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif not for_sites and not hmac.compare_digest(headers.get(SECRET.encode(), b""), self._password):
            await refuse(send, 403, b"Only for the server's own processes.")
        elif b"transfer-encoding" in headers or not length.isdigit() or int(length) > LARGEST:
            await refuse(send, 413, b"Too large.")
        elif for_sites and self._app.state.enable_supernode_auth:
            await self._answer_site(scope, receive, telling_time(send), int(length))
        else:
            self._connections.authenticated(scope.get("client"), b"")
            await self._pass_on(b"", scope, receive, telling_time(send))

    async def _answer_site(self, scope: dict[str, Any], receive: Any, send: Any, length: int) -> None:
        known = await run_in_threadpool(self._key_of, dict(scope["headers"]))
        if known is None:
            # Of two refusals, the one after which Flower's SuperNode ends at once; `fedkeel join` then tries again.
            await refuse(send, 412 if scope["path"] == FIRST_REQUEST else 401, b"No key of a site.")
            return
        key, scope[NODE] = known
        if self._under_way[key] + length > UNDER_WAY:
            await refuse(send, 503, b"Too much at once.")
        else:
            self._connections.authenticated(scope.get("client"), key)
            self._under_way[key] += length
            try:
                await self._pass_on(key, scope, receive, send)
            finally:
                self._under_way[key] -= length

    async def _pass_on(self, key: bytes, scope: dict[str, Any], receive: Any, send: Any) -> None:
        path = scope["path"]
        asked = {PULL: self._to_sites, PULL_REPLIES: self._to_server}.get(path)
        sent = {PUSH: self._to_sites, PUSH_REPLY: self._to_server}.get(path)
        if asked is not None:
            await asked.asked(key, scope, receive, send)
        else:
            await (sent.sent if sent is not None else self._app)(scope, receive, send)

    def _closes(self) -> bool:
        return self.is_closing

    def _key_of(self, headers: dict[bytes, bytes]) -> tuple[bytes, int] | None:
        """The site's key that a request is signed with, now and not long ago, and the node whose key that is."""
        signed = signer(headers, self._app.state)
        if signed is None:
            return None
        key, node, moment = signed
        ahead = moment - flower_internals.now()
        if not OLDEST < ahead < NEWEST:
            self._differences.write(str(node), ahead)
            return None
        self._differences.write(str(node), clock.number(headers.get(clock.DIFFERENCE.encode(), b"")) or 0.0)
        return key, node


def telling_time(send: Any) -> Any:
    """The same `send`, with what this server's clock says."""

    async def send_with_time(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            header = (clock.CLOCK.encode(), f"{flower_internals.now():.3f}".encode())
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    return send_with_time


async def refuse(send: Any, status: int, reason: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": reason})


def keep_log_short() -> None:
    """What strangers and sites make Flower write down does not fill the disk: a long log begins anew."""

    def watch() -> None:
        while not threading.Event().wait(5):
            shorten(1, LONGEST_LOG)

    threading.Thread(target=watch, daemon=True).start()


def shorten(descriptor: int, most: int) -> None:
    with contextlib.suppress(OSError):  # a pipe or a terminal has no end
        if os.fstat(descriptor).st_size > most:
            os.ftruncate(descriptor, 0)


class Server(uvicorn.Server):
    """Its guard knows when it goes down, and keeps no question any longer."""

    def __init__(self, guard: RequestGuard, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._guard = guard

    def handle_exit(self, sig: int, frame: Any) -> None:
        self._guard.is_closing = True
        super().handle_exit(sig, frame)


def serve(app: Any, config: Any, log_config: dict[str, Any]) -> None:
    """In place of Flower's own: uvicorn behind the guards."""
    secret = Path(sys.argv[sys.argv.index(SECRET_FILE) + 1]).read_bytes()
    connections = ConnectionGuard()
    guarded = RequestGuard(flower_processes.Straight(app), secret, connections, Differences())
    tls = {"ssl_keyfile": config.ssl_keyfile, "ssl_certfile": config.ssl_certfile}
    server = Server(guarded, uvicorn.Config(guarded, log_config=log_config, **tls, **UVICORN))
    server.run(sockets=[listen(config.host, config.port, connections)])


if __name__ == "__main__":
    clock.install()
    flower_processes.free_removed_keys()
    flower_processes.limit_store(Quota())
    flower_processes.write_less()
    keep_log_short()
    raise_descriptor_limit()
    flower_processes.run_superlink(serve)
