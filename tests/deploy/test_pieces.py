"""A small message is one request on each way; a large one, and one of a plain Flower node, goes as Flower sends it."""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

import httpx
from flwr.app import Message, MessageType
from flwr.app.message.message import remove_content_from_message
from flwr.common.constant import NOOP_FLWR_AID
from flwr.common.serde import message_to_proto, run_from_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import Run as RunProto
from flwr.supercore.constant import NOOP_FEDERATION_ID
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.superlink.main import create_app
from flwr.supernode.fleet_http_client import FleetHttpClient

from fedkeel.deploy import flower_internals, pieces
from fedkeel.deploy.flower_processes import NODE, Straight
from fedkeel.deploy.grid import from_records, reply_to, to_records
from fedkeel.deploy.pieces import Carrying

pytestmark = pytest.mark.slow
SMALL, LARGE = b"small" * 1000, os.urandom(pieces.MOST + 1)
OWN = ["push-messages", "pull-messages", "confirm-message-received"]


class Network:
    """Flower's server with a run under way, the grid of its app, and the client of one node; nothing is really sent."""

    def __init__(self) -> None:
        self.straight, self.asked = Straight(create_app()), list[str]()
        state = self.straight.state.linkstate_factory.state()
        self.node = int(state.create_node(NOOP_FLWR_AID, "me", b"a key", 30))
        assert state.activate_node(self.node, 30)
        self.run = state.create_run("a/b", "1", "0", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, "serverapp")
        (run,) = state.get_run_info(run_ids=[self.run])
        assert state.claim_task(run.primary_task_id)
        assert state.activate_task(run.primary_task_id)
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, self.run, 1
        self.grid = HttpGrid("127.0.0.1:1", insecure=True, token="a token")
        self.grid._client = self.client(RuntimeHttpClient)
        self.grid.set_run(run_from_proto(RunProto(run_id=self.run)))

    def client(self, kind: Any) -> Any:
        async def answer(scope: Any, receive: Any, send: Any) -> None:
            self.asked.append(scope["path"].rpartition("/")[2])
            of_site = {NODE: self.node} if kind is FleetHttpClient else {}
            await self.straight({**scope, **of_site}, receive, send)

        async def post(request: httpx.Request) -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(answer), base_url="http://here") as client:
                return await client.post(request.url.path, content=request.content)

        def handle(request: httpx.Request) -> httpx.Response:
            answered = asyncio.run(post(request))
            return httpx.Response(answered.status_code, content=answered.content, headers=answered.headers)

        made: Any = kind("http://here")
        made._client = httpx.Client(transport=httpx.MockTransport(handle))
        return made

    # What Flower's node does.
    def receive(self, client: Any) -> Message:
        node = Node(node_id=self.node)
        answer = client.PullMessages(PullMessagesRequest(node=node))
        (tree,), contents = answer.message_object_trees, dict[str, bytes]()
        for piece in iterate_object_tree(tree):
            asked = PullObjectRequest(node=node, run_id=self.run, object_id=piece.object_id)
            contents[piece.object_id] = client.PullObject(asked).object_content
        request = ConfirmMessageReceivedRequest(node=node, run_id=self.run, message_object_id=tree.object_id)
        client.ConfirmMessageReceived(request)
        message: Any = inflate_object_from_contents(tree.object_id, contents)
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def announcement(self, reply: Message) -> PushMessagesRequest:
        reply.metadata.__dict__["_message_id"] = reply.object_id
        return PushMessagesRequest(
            node=Node(node_id=self.node),
            messages_list=[message_to_proto(remove_content_from_message(reply))],
            message_object_trees=[get_object_tree(reply)],
        )

    def send(self, client: Any, reply: Message) -> None:
        objects = {number: one.deflate() for number, one in get_all_nested_objects(reply).items()}
        if isinstance(client, Carrying):
            client._content_of = objects.get
        answer = client.PushMessages(self.announcement(reply))
        for number in answer.objects_to_push:
            piece = PushObjectRequest(node=Node(node_id=self.node), run_id=self.run, session_id=answer.session_id)
            piece.object_id, piece.object_content = number, objects[number]
            assert client.PushObject(piece).stored


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, getattr(TaskIdentity, name))  # put back at the end
    made = Network()
    task = SimpleNamespace(run_id=made.run)
    monkeypatch.setattr("flwr.supercore.dependencies.task.authenticate_task", lambda *_: task)
    return made


def there_and_back(network: Network, content: bytes, site: Any) -> Message:
    """A message with this content to the site, which sends it back; what the server gets."""
    message = Message(to_records({"do": "train"}, content), network.node, MessageType.TRAIN, ttl=600)
    (number,) = flower_internals.push(network.grid, [message])
    came = network.receive(site)
    assert from_records(came.content) == ({"do": "train"}, content)
    network.send(site, reply_to(came, came.content))
    reply = flower_internals.fetch(network.grid, number, 2**30, time.monotonic() + 100)
    assert isinstance(reply, Message)
    assert from_records(reply.content) == ({"do": "train"}, content)
    return reply


def test_a_small_message_is_one_request_on_each_way(network: Network) -> None:
    there_and_back(network, SMALL, Carrying(network.client(FleetHttpClient)))
    assert network.asked == OWN * 2


def test_a_large_one_goes_piece_by_piece(network: Network) -> None:
    there_and_back(network, LARGE, Carrying(network.client(FleetHttpClient)))
    assert [path for path in network.asked if path in OWN] == OWN * 2
    assert network.asked.count("push-object") > 2
    assert network.asked.count("push-object") == network.asked.count("pull-object")


def test_a_plain_node_of_flower_sends_and_asks_as_ever(network: Network) -> None:
    there_and_back(network, SMALL, network.client(FleetHttpClient))
    assert network.asked == [
        "push-messages",  # the server's own needs no more
        "pull-messages", *["pull-object"] * 3, "confirm-message-received",
        "push-messages", *["push-object"] * 3,
        "pull-messages", "confirm-message-received",
    ]  # fmt: skip


def test_several_sites_share_what_is_the_same_and_what_is_too_much_in_all_goes_piece_by_piece(network: Network) -> None:
    state = network.straight.state.linkstate_factory.state()
    nodes = [network.node, *(int(state.create_node(NOOP_FLWR_AID, "me", key, 30)) for key in (b"b", b"c"))]
    for node in nodes[1:]:
        assert state.activate_node(node, 30)
    for content, alone in ((SMALL, True), (LARGE, False)):
        network.asked.clear()
        records = [to_records({"do": "train"}, content) for _ in nodes]
        sent = [Message(one, node, MessageType.TRAIN, ttl=600) for one, node in zip(records, nodes, strict=True)]
        assert len(set(flower_internals.push(network.grid, sent))) == 3
        assert (network.asked == ["push-messages"]) is alone


def test_what_was_not_announced_is_not_stored_and_what_is_not_what_it_says_is_asked_for_again(network: Network) -> None:
    message = Message(to_records({"do": "train"}, SMALL), network.node, MessageType.TRAIN, ttl=600)
    flower_internals.push(network.grid, [message])
    site = network.client(FleetHttpClient)
    came = network.receive(site)
    reply = reply_to(came, came.content)
    objects = {number: one.deflate() for number, one in get_all_nested_objects(reply).items()}
    false = dict.fromkeys(objects, b"something else")
    stranger = "0" * 64
    request = network.announcement(reply)
    pieces.attach(request, {**false, stranger: SMALL})
    answer = site.PushMessages(request)
    assert set(answer.objects_to_push) == objects.keys()
    assert network.straight.state.linkstate_factory.state().object_store.get(stranger) is None


def test_pieces_behind_a_message_do_not_change_what_it_says() -> None:
    request = PullMessagesRequest(node=Node(node_id=7))
    alone = request.SerializeToString()
    pieces.attach(request, {})
    assert request.SerializeToString() == alone
    pieces.attach(request, {"a": b"1", "b": b""})
    read = PullMessagesRequest.FromString(request.SerializeToString())
    assert read.node.node_id == 7
    assert pieces.attached(read) == {"a": b"1", "b": b""}
    assert pieces.attached(PullMessagesRequest.FromString(alone)) == {}


def test_no_piece_goes_along_when_one_is_not_there_yet() -> None:
    records = to_records({}, SMALL)
    objects = {number: one.deflate() for number, one in get_all_nested_objects(records).items()}
    tree = get_object_tree(records)
    assert pieces.gather([tree, tree], objects.get) == objects
    for missing in objects:
        assert pieces.gather([tree], {**objects, missing: b""}.get) == {}
        assert pieces.gather([tree], {number: objects[number] for number in objects if number != missing}.get) == {}
