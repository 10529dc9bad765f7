"""The ServerApp and the ClientApp of a plain Flower app, with a grid that is a list of messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import Metadata as MetadataProto
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

import fedkeel
from fedkeel.config import Config
from fedkeel.core.messages import BadMessage
from fedkeel.deploy import client_app, flower_internals, grid, server_app
from fedkeel.engine.executors.flower.channel import AWAY
from tests.deploy.real import ALONE, OPTIONS, SITES, draw_images
from tests.engine.executors.flower.test_executor import assert_same


@pytest.fixture(autouse=True)
def _task() -> None:
    """Flower stamps its messages with the task that they are of."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 2, 3


class Grid:
    """Delivers each message at once and keeps the replies until they are pulled."""

    def __init__(self, nodes: dict[int, dict[str, Any]]) -> None:
        self.nodes = nodes
        self.replies: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        numbers = []
        for message in messages:
            number = f"message {len(self.replies)}"
            message.metadata.__dict__["_message_id"] = number
            node = message.metadata.dst_node_id
            context = Context(1, node, self.nodes[node], RecordDict(), {})
            self.replies[number] = client_app(message, context)
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies[number] for number in message_ids]


@pytest.mark.slow
def test_the_apps_train_what_one_process_trains(tmp_path: Path) -> None:
    draw_images(tmp_path / "images")
    nodes = {
        number: {"data": str(tmp_path / "images" / name), "state": str(tmp_path / "state" / name), "device": "cpu"}
        for number, name in enumerate(SITES, start=70)
    }
    given = {**OPTIONS, "method": "scaffold+fedbn", "out": str(tmp_path / "run"), "sites": 3, "learning-rate": 0.05}
    del given["learning_rate"]
    server_app(Grid(nodes), Context(1, 0, {}, RecordDict(), given))
    data = f"folder(size=16, root='{tmp_path / 'images'}')"
    options = {**ALONE, "method": "scaffold+fedbn", "data": data, "executor": "serial"}
    assert_same(fedkeel.Run(tmp_path / "run"), fedkeel.simulate(options, directory=tmp_path / "serial"))


def test_nodes_of_a_simulation_are_the_clients_of_the_data_set(tmp_path: Path) -> None:
    draw_images(tmp_path / "images")
    data = f"folder(size=16, root='{tmp_path / 'images'}')"
    given = {**ALONE, "method": "fedavg", "data": data, "unseen": "south"}
    nodes = {number: {"partition-id": number, "num-partitions": 3} for number in range(3)}
    server_app(Grid(nodes), Context(1, 0, {}, RecordDict(), {**given, "out": str(tmp_path / "run"), "sites": 3}))
    wanted = fedkeel.simulate({**given, "executor": "serial"}, directory=tmp_path / "serial")
    assert_same(fedkeel.Run(tmp_path / "run"), wanted)


def test_a_table_and_bytes_survive_flower_s_records() -> None:
    table, data = {"do": "train", "step": [3, 1], "text": "ä"}, bytes(range(256))
    assert grid.from_records(grid.to_records(table, data)) == (table, data)
    assert grid.from_records(grid.to_records(table, b"")) == (table, b"")


@pytest.mark.parametrize(
    "records",
    [
        RecordDict(),
        RecordDict({"fedkeel": ConfigRecord({"table": "[]"})}),
        RecordDict({"fedkeel": ConfigRecord({"table": "{"})}),
        RecordDict({"fedkeel": ConfigRecord({"table": 7})}),
        RecordDict({"fedkeel": ConfigRecord({"table": "{}"}), "fedkeel.tensors": ConfigRecord({"message": b"x"})}),
    ],
)
def test_records_of_another_kind_are_refused(records: RecordDict) -> None:
    with pytest.raises(BadMessage):
        grid.from_records(records)


def test_errors_of_flower_are_told_in_words() -> None:
    question = Message(RecordDict(), 5, "train")
    gone = Message(Error(ErrorCode.NODE_UNAVAILABLE, "no heartbeat"), reply_to=question)
    assert grid.read_message(gone) == AWAY
    late = Message(Error(ErrorCode.MESSAGE_UNAVAILABLE, "it may have expired"), reply_to=question)
    assert grid.read_message(late) is None
    broken = Message(Error(ErrorCode.CLIENT_APP_CRASHED, "kil\x1b\nled"), reply_to=question)
    assert grid.read_message(broken) == "it failed (killed)"


class Hostile(Grid):
    """What one node replies to its second training makes Flower itself fail, or never comes to an end."""

    def __init__(self, nodes: dict[int, dict[str, Any]], fail: Callable[[], None]) -> None:
        super().__init__(nodes)
        self.fail = fail
        self.bad = ""

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        numbers = super().push_messages(messages)
        for number, message in zip(numbers, messages, strict=True):
            request = grid.from_records(message.content)[0]
            if message.metadata.dst_node_id == 70 and request["do"] == "train" and request["step"][0] == 1:
                self.bad = number
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        if self.bad in list(message_ids):
            self.fail()
        return super().pull_messages(message_ids)


def break_off() -> None:
    raise ValueError("Object of type Bomb is not supported.")


def never_end() -> None:
    threading.Event().wait()  # in a thread that ends with the tests


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Time stands still while a channel waits, until the nodes in this set are the only ones that have not replied."""
    silent: set[int] = set()
    now = [0.0]
    usual = grid.GridChannel.exchange

    def exchange(self: grid.GridChannel, requests: Any, message: bytes, timeout: float) -> Iterator[Any]:
        left = set(requests)
        for node, reply in usual(self, requests, message, timeout):
            left.remove(node)
            if left and left <= silent:
                now[0] += timeout
            yield node, reply

    monkeypatch.setattr(grid, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(grid.GridChannel, "exchange", exchange)
    return silent


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        pytest.param(break_off, "its reply cannot be read (ValueError)", id="it cannot be read"),
        pytest.param(never_end, "it did not reply within 4 s", id="it never ends"),
    ],
)
def test_a_reply_that_trips_flower_is_missing_and_those_of_the_others_are_not(
    tmp_path: Path, fail: Callable[[], None], reason: str, patience: set[int]
) -> None:
    patience.add(70)
    draw_images(tmp_path / "images")
    nodes = {
        number: {"data": str(tmp_path / "images" / name), "state": str(tmp_path / "state" / name), "device": "cpu"}
        for number, name in enumerate(SITES, start=70)
    }
    given = {**OPTIONS, "method": "fedavg", "out": str(tmp_path / "run"), "sites": 3, "round_timeout": 4.0}
    server_app(Hostile(nodes, fail), Context(1, 0, {}, RecordDict(), given))
    run = fedkeel.Run(tmp_path / "run")
    (dropped,) = run.records("dropped")
    assert (dropped["round"], dropped["client"], dropped["reason"]) == (1, "north", reason)
    assert [r["client"] for r in run.records("client") if r["round"] == 1] == ["south", "west"]


class Parts:
    """A Flower client whose objects have a size, or do not come."""

    def __init__(self, size: int, available: bool = True) -> None:
        self.size, self.available = size, available

    def PullObject(self, _: Any) -> Any:  # noqa: N802
        return PullObjectResponse(object_found=True, object_available=self.available, object_content=bytes(self.size))


def test_a_reply_is_given_up_when_it_grows_beyond_reason_or_is_never_complete() -> None:
    later = time.monotonic() + 100
    guard = flower_internals.MeasuredClient(Parts(400), 1000, later)
    for _ in range(2):
        guard.PullObject(PullObjectRequest())
    with pytest.raises(ObjectPullError, match="more than 1,000 bytes"):
        guard.PullObject(PullObjectRequest())
    incomplete = flower_internals.MeasuredClient(Parts(0, available=False), 1000, later)
    assert not incomplete.PullObject(PullObjectRequest()).object_available, "the rest may still come"
    incomplete = flower_internals.MeasuredClient(Parts(0, available=False), 1000, time.monotonic() - 1)
    with pytest.raises(ObjectPullError, match="not complete in time"):
        incomplete.PullObject(PullObjectRequest())


class Link:
    """A Flower client with one reply, in two pieces; of the second there is nothing, or too much of it."""

    def __init__(self, number: str, second: PullObjectResponse) -> None:
        self.number, self.second = number, second
        self.pulled: list[str] = []
        self.deleted: list[str] = []

    def PullMessages(self, _: Any) -> Any:  # noqa: N802
        reply = MessageProto(metadata=MetadataProto(message_id="the reply", reply_to_message_id=self.number))
        tree = ObjectTree(object_id="whole", children=[ObjectTree(object_id="first"), ObjectTree(object_id="second")])
        return PullAppMessagesResponse(messages_list=[reply], message_object_trees=[tree])

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        self.pulled.append(request.object_id)
        whole = PullObjectResponse(object_found=True, object_available=True, object_content=b"x")
        return self.second if request.object_id == "second" else whole

    def ConfirmMessageReceived(self, request: Any) -> None:  # noqa: N802
        self.deleted.append(request.message_object_id)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (PullObjectResponse(object_found=True, object_available=True, object_content=bytes(5000)), "more than 1,000"),
        (PullObjectResponse(object_found=False), "its reply is cut off: it may have 1,000 bytes"),
    ],
)
def test_over_a_network_a_reply_is_measured_while_it_comes_and_what_is_refused_is_deleted(
    second: PullObjectResponse, said: str
) -> None:
    """Also of a plain Flower app, whose grid is this one."""
    over, link = HttpGrid("127.0.0.1:1", insecure=True, token="a token"), Link("7", second)
    over._client = link  # type: ignore[assignment]
    over.set_run(Run.create_empty(1))
    found = grid.GridChannel(over)._fetch("7", 1000, time.monotonic() + 100)
    assert isinstance(found, str)
    assert said in found
    assert link.deleted == ["the reply"]


def test_messages_that_nobody_waits_for_any_more_are_deleted(
    tmp_path: Path, patience: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is not fetched holds the whole model, and there is one in every round."""
    patience.add(71)
    draw_images(tmp_path / "images", {"north": 4})
    nodes = {number: {"data": str(tmp_path / "images/north"), "device": "cpu"} for number in (70, 71)}

    class Silent(Grid):
        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            return [reply for reply in super().pull_messages(message_ids) if reply.metadata.src_node_id != 71]

    deleted: list[str] = []
    monkeypatch.setattr(flower_internals, "forget", lambda _, numbers: deleted.extend(numbers))
    channel = grid.GridChannel(Silent(nodes))
    config = Config(**OPTIONS).to_dict()
    request = {"do": "describe", "session": {"version": fedkeel.__version__, "config": config, "classes": None}}
    came = dict(channel.exchange(dict.fromkeys(nodes, request), b"", 1.0))
    assert list(came) == [70]
    assert deleted == ["message 1"]  # the other was deleted when it was received


def test_a_table_beyond_reason_is_not_even_read() -> None:
    records = grid.to_records({"text": "x" * 5 * 2**20}, b"")
    with pytest.raises(BadMessage, match="more than 4,194,304"):
        grid.from_records(records)
