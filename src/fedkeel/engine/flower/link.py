"""Flower's SuperLink with its door for strangers closed, and with room for what sites have to say but no more.

SuperLink has one port for everything: for sites (the Fleet API), for whoever starts and stops runs (Control) and for
its own processes (Runtime). Node keys guard the first; the other two are open to anyone who can reach the port, and
whoever starts a run gives it code. Here these two answer only to this machine itself. And Flower reads a request whole
before it looks at the key: here the key comes first.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import threading
from collections import Counter
from typing import Any

from fedkeel.engine.flower import quota
from fedkeel.engine.flower.limits import LARGEST, LONGEST_LOG, UNDER_WAY

FOR_SITES = "/v1/fleet/"
FIRST = FOR_SITES + "activate-node"


def from_this_machine(scope: dict[str, Any]) -> bool:
    """Whether a request comes over loopback, or from the very address at which it arrived."""
    client, server = scope.get("client"), scope.get("server")
    if not client:
        return False
    try:
        if ipaddress.ip_address(client[0]).is_loopback:
            return True
    except ValueError:
        return False
    return server is not None and client[0] == server[0]


def too_large(scope: dict[str, Any]) -> bool:
    """Whether a request says that it is larger than any of a site's, or does not say how large it is."""
    headers = dict(scope.get("headers", ()))
    length = headers.get(b"content-length", b"0")
    return b"transfer-encoding" in headers or not length.isdigit() or int(length) > LARGEST


class OnlySitesFromOutside:
    """Middleware: other machines may ask for what sites ask for, with a site's key, and for nothing else. Nobody is
    read without end."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._under_way: Counter[bytes] = Counter()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        for_sites = scope.get("path", "").startswith(FOR_SITES)
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif not for_sites and not from_this_machine(scope):
            if scope["type"] == "http":
                await refuse(send, 403, b"Only sites may come from outside.")
            else:
                await send({"type": "websocket.close", "code": 1008})
        elif scope["type"] == "http" and too_large(scope):
            await refuse(send, 413, b"Too large.")
        elif for_sites and scope["type"] == "http" and scope["app"].state.enable_supernode_auth:
            await self._of_a_site(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _of_a_site(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        from starlette.concurrency import run_in_threadpool

        key = await run_in_threadpool(known_key, scope)
        length = int(dict(scope["headers"]).get(b"content-length", b"0"))
        if key is None:
            # Of two refusals, the one after which Flower's SuperNode ends at once; `fedkeel join` then tries again.
            await refuse(send, 412 if scope["path"] == FIRST else 401, b"No key of a site.")
        elif self._under_way[key] + length > UNDER_WAY:
            await refuse(send, 503, b"Too much at once.")
        else:
            self._under_way[key] += length
            try:
                await self._app(scope, receive, send)
            finally:
                self._under_way[key] -= length


def known_key(scope: dict[str, Any]) -> bytes | None:
    """The public key that a request is signed with, if it is one of a site's. All of it is in the headers."""
    import binascii
    from base64 import b64decode

    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    headers = dict(scope["headers"])
    names = (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)
    try:
        key, signature, moment = (headers[name.lower().encode()] for name in names)
        key, signature = b64decode(key, validate=True), b64decode(signature, validate=True)
        state = scope["app"].state.linkstate_factory.state()
        if state.get_node_id_by_public_key(key) is None:
            return None
        return key if verify_signature(bytes_to_public_key(key), moment, signature) else None
    except (KeyError, ValueError, TypeError, binascii.Error):
        return None


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


def main() -> None:
    from flwr.superlink import main as api
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    usual = api._get_middleware
    api._get_middleware = lambda: [Middleware(OnlySitesFromOutside), *usual()]
    forget_removed_keys()
    quota.install(quota.Quota())
    keep_log_short()
    flower_superlink()


if __name__ == "__main__":
    main()
