"""What goes straight to Flower's handlers is answered as it is on the long way."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

import httpx
from flwr.common.constant import NOOP_FLWR_AID
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import GetNodesRequest
from flwr.supercore.constant import TASK_TOKEN_HEADER
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.superlink.main import create_app

from fedkeel.deploy import flower_internals
from fedkeel.deploy.flower_processes import NODE, Straight

pytestmark = pytest.mark.slow
FLEET, RUNTIME = "/v1/fleet", "/v1/runtime"


class Both:
    """Flower's own app, and the same with the short cut before it; one site is registered."""

    def __init__(self) -> None:
        self.app: Any = create_app()
        self.app.state.enable_supernode_auth = True
        self.straight = Straight(self.app)
        self.long_way = 0
        self.private, public = generate_key_pairs()
        self.public: Any = public
        state = self.app.state.linkstate_factory.state()
        self.node = int(state.create_node(NOOP_FLWR_AID, "me", public_key_to_bytes(public), 30))
        assert state.activate_node(self.node, 30)

    def ask(self, path: str, body: bytes, known: int | None = None, **headers: str) -> tuple[httpx.Response, ...]:
        """Both answers; `known` is the node of the key that the guard has found a request signed with."""
        inner = self.app

        async def counted(scope: Any, receive: Any, send: Any) -> None:
            self.long_way += 1
            await inner(scope, receive, send)

        async def short(scope: Any, receive: Any, send: Any) -> None:
            await self.straight(scope if known is None else {**scope, NODE: known}, receive, send)

        self.straight.app = counted
        signed = flower_internals.signature(self.private, self.public, flower_internals.now())
        headers = {"content-type": "application/protobuf", **signed, **headers}

        async def post(app: Any) -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
                return await client.post(path, content=body, headers=headers)

        return tuple(asyncio.run(post(app)) for app in (inner, short))


@pytest.fixture(scope="module")
def both() -> Both:
    return Both()


def same(answers: tuple[httpx.Response, ...]) -> int:
    long, short = answers
    assert short.status_code == long.status_code
    assert short.content == long.content
    assert short.headers["content-type"] == long.headers["content-type"]
    return long.status_code


def requests(node: int) -> list[tuple[str, bytes, int]]:
    of, beat = Node(node_id=node), f"{FLEET}/send-node-heartbeat"
    return [
        (f"{FLEET}/pull-messages", PullMessagesRequest(node=of).SerializeToString(), 200),
        (beat, SendNodeHeartbeatRequest(node=of, heartbeat_interval=30).SerializeToString(), 200),
        (beat, SendNodeHeartbeatRequest(node=of).SerializeToString(), 400),
        (f"{FLEET}/pull-object", PullObjectRequest(node=of, run_id=1, object_id="x").SerializeToString(), 500),
        (f"{FLEET}/confirm-message-received", ConfirmMessageReceivedRequest(node=of).SerializeToString(), 500),
        (f"{FLEET}/pull-messages", b"\xff\xff garbage", 400),
    ]  # fmt: skip


@pytest.mark.parametrize("number", range(6))
def test_a_site_hears_the_same(both: Both, number: int) -> None:
    path, body, wanted = requests(both.node)[number]
    before = both.long_way
    assert same(both.ask(path, body, known=both.node)) == wanted
    assert both.long_way == before


def test_a_site_that_speaks_for_another_is_refused(both: Both) -> None:
    for path, body, _ in requests(both.node + 1)[:5]:
        assert same(both.ask(path, body, known=both.node)) == 401


def test_who_is_not_known_goes_the_long_way(both: Both) -> None:
    path, body, _ = requests(both.node)[0]
    before = both.long_way
    assert same(both.ask(path, body)) == 200
    assert both.ask(f"{FLEET}/get-run", b"", known=both.node)[1].status_code == 401
    assert both.long_way == before + 2


@pytest.mark.parametrize("token", ["", "not one of Flower's"])
def test_the_server_needs_the_token_of_its_task(both: Both, token: str) -> None:
    headers = {TASK_TOKEN_HEADER: token} if token else {}
    assert same(both.ask(f"{RUNTIME}/get-nodes", GetNodesRequest().SerializeToString(), **headers)) == 401
