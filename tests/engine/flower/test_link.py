"""From outside, only what sites need answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fedkeel.engine.flower.link import OnlySitesFromOutside


def status(path: str, client: str | None, server: str = "10.0.0.1", **headers: str) -> int:
    """What a request gets; 200 is the app behind the middleware."""
    sent: list[dict[str, Any]] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "client": (client, 4711) if client else None, "server": (server, 9092)}
    scope["headers"] = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(OnlySitesFromOutside(app)(scope, None, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/", "/v1/fleetx/"])
def test_another_machine_gets_nothing_but_the_fleet_api(path: str) -> None:
    assert status(path, "10.0.0.7") == 403
    assert status(path, None) == 403
    assert status(path, "not an address") == 403
    assert status("/v1/fleet/pull-messages", "10.0.0.7") == 200


@pytest.mark.parametrize("client", ["127.0.0.1", "127.3.2.1", "::1", "10.0.0.1"])
def test_this_machine_may_use_everything(client: str) -> None:
    assert status("/v1/control/start-run", client) == 200


def test_a_request_larger_than_any_of_a_site_is_refused_before_it_is_read() -> None:
    push = "/v1/fleet/push-object"
    assert status(push, "10.0.0.7", content_length=str(21 * 2**20)) == 200
    assert status(push, "10.0.0.7", content_length=str(65 * 2**20)) == 413
    assert status(push, "127.0.0.1", content_length=str(10**12)) == 413
    assert status(push, "10.0.0.7", content_length="-1") == 413
    assert status(push, "10.0.0.7", transfer_encoding="chunked") == 413, "it does not say how large it is"
