"""Flower's SuperLink with its door for strangers closed, and with room for what sites have to say but no more.

SuperLink has one port for everything: for sites (the Fleet API), for whoever starts and stops runs (Control) and for
its own processes (Runtime). Node keys guard the first; the other two are open to anyone who can reach the port, and
whoever starts a run gives it code. Here these two answer only to who knows a secret that the server makes at its start
and keeps in a file of its own: where a request comes from is told by proxies, and everyone on a machine comes from it.
And Flower reads a request whole before it looks at the key: here the key comes first.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import importlib
import os
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from fedkeel.deploy import clock, quota
from fedkeel.deploy.clock import Differences
from fedkeel.deploy.door import UVICORN, Door, listen, raise_limit
from fedkeel.engine.executors.flower.limits import LARGEST, LONGEST_LOG, UNDER_WAY

FOR_SITES = "/v1/fleet/"
FIRST = FOR_SITES + "activate-node"
SECRET = "fedkeel-secret"  # a header
SECRET_FILE = "--superexec-auth-secret-file"


def pass_word(secret: bytes) -> str:
    """What to show in the header: of the secret that Fedkeel and its Flower process share, and not that itself, which
    Flower signs with."""
    return hmac.new(secret, b"fedkeel control and runtime", hashlib.sha256).hexdigest()


def knows(scope: dict[str, Any], word: str) -> bool:
    """Whether a request has the header that only the server's own processes can send."""
    return hmac.compare_digest(dict(scope.get("headers", ())).get(SECRET.encode(), b""), word.encode())


def too_large(scope: dict[str, Any]) -> bool:
    """Whether a request says that it is larger than any of a site's, or does not say how large it is."""
    headers = dict(scope.get("headers", ()))
    length = headers.get(b"content-length", b"0")
    return b"transfer-encoding" in headers or not length.isdigit() or int(length) > LARGEST


class OnlySites:
    """Middleware: who has a site's key may ask for what sites ask for, who has the server's secret for the rest. Nobody
    is read, or waited for, without end."""

    def __init__(self, app: Any, word: str, door: Door, differences: Differences) -> None:
        self._app, self._word, self._door, self._differences = app, word, door, differences
        self._under_way: Counter[bytes] = Counter()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        peer = scope.get("client")
        self._door.heard(peer)
        try:
            await self._answer(scope, self._door.hurrying(peer, receive), send)
        finally:
            self._door.awaits(peer)

    async def _answer(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        for_sites = scope.get("path", "").startswith(FOR_SITES)
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif not for_sites and not knows(scope, self._word):
            await refuse(send, 403, b"Only for the server's own processes.")
        elif too_large(scope):
            await refuse(send, 413, b"Too large.")
        elif for_sites and scope["app"].state.enable_supernode_auth:
            await self._of_a_site(scope, receive, telling_time(send))
        else:
            self._door.showed(scope.get("client"), b"")
            await self._app(scope, receive, telling_time(send))

    async def _of_a_site(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        from starlette.concurrency import run_in_threadpool

        key = await run_in_threadpool(known_key, scope, self._differences)
        length = int(dict(scope["headers"]).get(b"content-length", b"0"))
        if key is None:
            # Of two refusals, the one after which Flower's SuperNode ends at once; `fedkeel join` then tries again.
            await refuse(send, 412 if scope["path"] == FIRST else 401, b"No key of a site.")
        elif self._under_way[key] + length > UNDER_WAY:
            await refuse(send, 503, b"Too much at once.")
        else:
            self._door.showed(scope.get("client"), key)
            self._under_way[key] += length
            try:
                await self._app(scope, receive, send)
            finally:
                self._under_way[key] -= length


def known_key(scope: dict[str, Any], differences: Differences) -> bytes | None:
    """The public key that a request is signed with, now and not long ago, if it is one of a site's. All of it is in the
    headers."""
    import binascii
    from base64 import b64decode

    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    headers = dict(scope["headers"])
    names = (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)
    try:
        key, signature, moment = (headers[name.lower().encode()] for name in names)
        key, signature = b64decode(key, validate=True), b64decode(signature, validate=True)
        node = scope["app"].state.linkstate_factory.state().get_node_id_by_public_key(key)
        if node is None or not verify_signature(bytes_to_public_key(key), moment, signature):
            return None
        ahead = datetime.datetime.fromisoformat(moment.decode()).timestamp() - clock.now()
        if not -TIMESTAMP_TOLERANCE - SYSTEM_TIME_TOLERANCE < ahead < SYSTEM_TIME_TOLERANCE:
            differences.write(str(node), ahead)
            return None
        told = clock.number(headers.get(clock.DIFFERENCE.encode(), b"").decode())
        differences.write(str(node), told or 0.0)
        return key
    except (KeyError, ValueError, TypeError, OverflowError, OSError, binascii.Error):
        return None


def telling_time(send: Any) -> Any:
    """The same, with what this server's clock says."""

    async def told(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            header = (clock.CLOCK.encode(), f"{clock.now():.3f}".encode())
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    return told


async def refuse(send: Any, status: int, reason: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": reason})


def forget_removed_keys() -> None:
    """A key that was removed may be added again: Flower would keep it for ever, and refuse it as one already in use."""
    from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
    from flwr.supercore.state.schema.linkstate_models import Node
    from flwr.supercore.utils import uint64_to_int64
    from sqlalchemy import update

    usual = SqlLinkState.delete_node

    def delete_node(self: Any, owner_aid: str, node_id: int) -> None:
        usual(self, owner_aid, node_id)
        with self.session() as session:
            session.execute(update(Node).where(Node.node_id == uint64_to_int64(node_id)).values(public_key=None))

    SqlLinkState.delete_node = delete_node  # type: ignore[method-assign]


def keep_log_short() -> None:
    """What strangers and sites make Flower write down does not fill the disk: a long log begins anew."""

    def watch() -> None:
        over = threading.Event()
        while not over.wait(5):
            shorten(1, LONGEST_LOG)

    threading.Thread(target=watch, daemon=True).start()


def shorten(descriptor: int, most: int) -> None:
    with contextlib.suppress(OSError):  # a pipe or a terminal has no end
        if os.fstat(descriptor).st_size > most:
            os.ftruncate(descriptor, 0)


def serve_app(config: Any, word: str) -> None:
    """In place of Flower's own: uvicorn behind the door, with the middleware around its app."""
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import console_handler
    from flwr.superlink import main as api
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
    from starlette.middleware import Middleware

    door, usual = Door(), api._get_middleware
    guard = Middleware(OnlySites, word=word, door=door, differences=Differences.given())
    api._get_middleware = lambda: [guard, *usual()]
    server = uvicorn.Server(
        uvicorn.Config(
            api.create_app(config, SuperLinkLifespan), log_config=get_uvicorn_log_config(console_handler.level),
            ssl_keyfile=config.ssl_keyfile, ssl_certfile=config.ssl_certfile, **UVICORN,
        )
    )  # fmt: skip
    server.run(sockets=[listen(config.host, config.port, door)])


def main() -> None:
    cli: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")
    word = pass_word(Path(sys.argv[sys.argv.index(SECRET_FILE) + 1]).read_bytes())
    clock.install_given()
    cli._run_superlink_http_api = lambda lifespan_config: serve_app(lifespan_config, word)
    forget_removed_keys()
    quota.install(quota.Quota())
    keep_log_short()
    raise_limit()
    cli.flower_superlink()


if __name__ == "__main__":
    main()
