"""Requests and replies as Flower's messages.

A message holds a small table, as JSON in a `ConfigRecord`, and the bytes of a Broadcast or an Update (safetensors) as
one `Array`: Flower cuts large arrays into pieces and stores equal ones once, so a broadcast to twenty sites lies on
the server once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode

from fedkeel.engine.flower.gathering import AWAY, POLL, Reply, Table, pause
from fedkeel.messages import BadMessage

TABLE, BYTES = "fedkeel", "fedkeel.tensors"
SAFETENSORS = "fedkeel.safetensors"
KINDS = {
    "describe": MessageType.QUERY,
    "train": MessageType.TRAIN,
    "evaluate": MessageType.EVALUATE,
    "ask": MessageType.QUERY,
}


def to_records(table: Table, message: bytes) -> RecordDict:
    records = RecordDict({TABLE: ConfigRecord({"table": json.dumps(table)})})
    if message:
        array = Array(dtype="uint8", shape=(len(message),), stype=SAFETENSORS, data=message)
        records[BYTES] = ArrayRecord({"message": array})
    return records


def from_records(records: RecordDict) -> Reply:
    """The inverse; raises `BadMessage` on anything else that a node may have sent."""
    try:
        given: Any = dict(records.items())
        table = json.loads(given[TABLE]["table"])
        array = given[BYTES]["message"] if BYTES in given else None
        if not isinstance(table, dict) or (array is not None and array.stype != SAFETENSORS):
            raise BadMessage("its reply is not one of fedkeel's")
        return table, bytes(array.data) if array is not None else b""
    except BadMessage:
        raise
    except Exception as error:  # whatever the bytes of a stranger make Flower's records do
        raise BadMessage(f"its reply cannot be read ({type(error).__name__})") from error


class GridChannel:
    """A `Channel` over the grid that Flower gives to a ServerApp."""

    def __init__(self, grid: Any) -> None:
        self._grid = grid

    def nodes(self) -> list[int]:
        return sorted(self._grid.get_node_ids())

    def exchange(
        self, requests: Mapping[int, Table], message: bytes, timeout: float
    ) -> Iterator[tuple[int, Reply | str]]:
        messages = [
            Message(to_records(request, message), node, KINDS[request["do"]], ttl=timeout)
            for node, request in requests.items()
        ]
        ids = list(self._grid.push_messages(messages)) if messages else []
        waiting = {number: node for number, node in zip(ids, requests, strict=False) if number}
        for node in [node for node in requests if node not in waiting.values()]:
            yield node, "the message to it could not be sent"
        deadline = time.monotonic() + timeout
        while waiting and time.monotonic() < deadline:
            for reply in self._grid.pull_messages(list(waiting)):
                if reply.metadata.reply_to_message_id in waiting:
                    yield waiting.pop(reply.metadata.reply_to_message_id), read_reply(reply)
            if waiting:
                pause(POLL)


def read_reply(reply: Message) -> Reply | str:
    if reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE:
        return AWAY
    if reply.has_error():
        return f"it failed ({str(reply.error.reason)[:300]})"
    try:
        return from_records(reply.content)
    except BadMessage as bad:
        return str(bad)
