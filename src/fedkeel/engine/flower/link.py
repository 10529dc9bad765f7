"""Flower's SuperLink with its door for strangers closed.

SuperLink has one port for everything: for sites (the Fleet API), for whoever starts and stops runs (Control) and for
its own processes (Runtime). Node keys guard the first; the other two are open to anyone who can reach the port, and
whoever starts a run gives it code. Here these two answer only to this machine itself.
"""

from __future__ import annotations

import ipaddress
from typing import Any

FOR_SITES = "/v1/fleet/"
LARGEST = 64 * 2**20  # bytes of one request: Flower cuts what is larger than 20 MiB into pieces


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
    """Middleware: other machines may ask for what sites ask for, and for nothing else. Nobody is read without end."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        allowed = scope["type"] == "lifespan" or scope.get("path", "").startswith(FOR_SITES) or from_this_machine(scope)
        if allowed and scope["type"] == "http" and too_large(scope):
            await refuse(send, 413, b"Too large.")
        elif allowed:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await refuse(send, 403, b"Only sites may come from outside.")
        else:
            await send({"type": "websocket.close", "code": 1008})


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


def main() -> None:
    from flwr.superlink import main as api
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    usual = api._get_middleware
    api._get_middleware = lambda: [Middleware(OnlySitesFromOutside), *usual()]
    forget_removed_keys()
    flower_superlink()


if __name__ == "__main__":
    main()
