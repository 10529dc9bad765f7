"""The ServerApp and the ClientApp of a Flower app, with a grid that is a list of messages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

import fedkeel
from fedkeel.core.messages import BadMessage
from fedkeel.deploy.flower import client_app, content_of, from_records, server_app, to_records
from tests.deploy.real import ALONE, OPTIONS, SITES, draw_images
from tests.engine.executors.sites.test_executor import assert_same

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _task() -> None:
    """Flower stamps its messages with the task that they are of."""
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 2, 3


class Grid:
    """Delivers each message at once and keeps the replies until they are pulled."""

    def __init__(self, nodes: dict[int, dict[str, Any]], run: dict[str, Any]) -> None:
        self.nodes, self.run = nodes, run
        self.replies: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        numbers = []
        for message in messages:
            number = f"message {len(self.replies)}"
            message.metadata.__dict__["_message_id"] = number
            node = message.metadata.dst_node_id
            context = Context(1, node, self.nodes[node], RecordDict(), self.run)
            self.replies[number] = client_app(message, context)
            numbers.append(number)
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies[number] for number in message_ids]


def test_the_apps_train_what_one_process_trains(tmp_path: Path) -> None:
    draw_images(tmp_path / "images")
    nodes = {
        number: {"data": str(tmp_path / "images" / name), "state": str(tmp_path / "state" / name), "device": "cpu"}
        for number, name in enumerate(SITES, start=70)
    }
    given = {**OPTIONS, "method": "scaffold+fedbn", "out": str(tmp_path / "run"), "sites": 3, "learning-rate": 0.05}
    del given["learning_rate"]
    server_app(Grid(nodes, given), Context(1, 0, {}, RecordDict(), given))
    data = f"folder(size=16, root='{tmp_path / 'images'}')"
    options = {**ALONE, "method": "scaffold+fedbn", "data": data, "executor": "serial"}
    assert_same(fedkeel.Run(tmp_path / "run"), fedkeel.simulate(options, directory=tmp_path / "serial"))


def test_a_table_and_bytes_survive_flower_s_records() -> None:
    table, data = {"do": "train", "step": [3, 1], "text": "ä"}, bytes(range(256))
    assert from_records(to_records(table, data)) == (table, data)
    assert from_records(to_records(table, b"")) == (table, b"")


@pytest.mark.parametrize(
    "records",
    [
        RecordDict(),
        RecordDict({"table": ConfigRecord({"table": "[]"})}),
        RecordDict({"table": ConfigRecord({"table": "{"})}),
        RecordDict({"table": ConfigRecord({"table": 7})}),
        RecordDict({"table": ConfigRecord({"table": "{}"}), "tensors": ConfigRecord({"tensors": b"x"})}),
    ],
)
def test_records_of_another_kind_are_refused(records: RecordDict) -> None:
    with pytest.raises(BadMessage):
        from_records(records)


def test_errors_of_flower_are_told_in_words() -> None:
    gone = Message(Error(1, "no heartbeat"), reply_to=Message(RecordDict(), 5, "query"))
    assert content_of(gone) == "its Flower says: no heartbeat"
