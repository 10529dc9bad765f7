"""Requests and replies as Flower's messages.

A message holds a small table, as JSON in a `ConfigRecord`, and the bytes of a Broadcast or an Update (safetensors) as
one `Array`: Flower cuts large arrays into pieces and stores equal ones once, so a broadcast to twenty sites lies on
the server once.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from queue import Empty, Queue
from typing import Any

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode

from fedkeel.core.messages import BadMessage, reading
from fedkeel.engine.executors.flower.gathering import AWAY, POLL, Reply, Table, pause, plain
from fedkeel.engine.executors.flower.limits import largest_reply

TABLE, BYTES = "fedkeel", "fedkeel.tensors"
SAFETENSORS = "fedkeel.safetensors"
LARGEST_TABLE = 4 * 2**20
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
    with reading("its reply cannot be read"):
        given: Any = dict(records.items())
        text = given[TABLE]["table"]
        if len(text) > LARGEST_TABLE:
            raise BadMessage(f"its reply has a table of {len(text):,} bytes, more than {LARGEST_TABLE:,}")
        table = json.loads(text)
        array = given[BYTES]["message"] if BYTES in given else None
        if not isinstance(table, dict) or (array is not None and array.stype != SAFETENSORS):
            raise BadMessage("its reply is not one of fedkeel's")
        return table, bytes(array.data) if array is not None else b""


# Of a message's number, the largest size and the latest moment: its reply, what is wrong with it, or None as yet.
Fetch = Callable[[str, int, float], "Reply | str | None"]
# Messages, by their numbers, that nobody waits for any more.
Forget = Callable[[list[str]], None]


class GridChannel:
    """A `Channel` over the grid that Flower gives to a ServerApp.

    Each reply is fetched by itself: one that cannot be read, or is never complete, is nobody else's business.
    """

    def __init__(self, grid: Any, fetch: Fetch | None = None, forget: Forget | None = None) -> None:
        self._grid = grid
        self._fetch = fetch or self._pull
        self._forget = forget

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
        waiting = {node: number for number, node in zip(ids, requests, strict=False) if number}
        for node in [node for node in requests if node not in waiting]:
            yield node, "the message to it could not be sent"
        came: Queue[tuple[int, Reply | str | httpx.TransportError]] = Queue()
        over, deadline, most = threading.Event(), time.monotonic() + timeout, largest_reply(len(message))
        interval = POLL * max(1.0, len(waiting) / 10)  # of each: Flower's process has to answer them all

        def look(node: int, number: str) -> None:
            while not over.is_set() and time.monotonic() < deadline:
                reply = self._try(number, most, deadline)
                if reply is not None:
                    came.put((node, reply))
                    return
                over.wait(interval)

        for node, number in waiting.items():
            threading.Thread(target=look, args=(node, number), daemon=True).start()
        try:
            while waiting and time.monotonic() < deadline:
                try:
                    node, reply = came.get(timeout=POLL)
                except Empty:
                    pause(0)
                    continue
                if isinstance(reply, httpx.TransportError):
                    raise reply
                del waiting[node]
                yield node, reply
        finally:
            over.set()
            if self._forget is not None:
                self._forget([number for number in ids if number])

    def _try(self, number: str, most: int, deadline: float) -> Reply | str | httpx.TransportError | None:
        try:
            return self._fetch(number, most, deadline)
        except httpx.TransportError as gone:  # Flower's own process, not the site
            return gone
        except Exception as error:  # whatever the objects of a stranger make Flower do
            return f"its reply cannot be read ({type(error).__name__})"

    def _pull(self, number: str, _most: int, _deadline: float) -> Reply | str | None:
        replies = list(self._grid.pull_messages([number]))
        return read_reply(replies[0]) if replies else None


def read_reply(reply: Message) -> Reply | str | None:
    if reply.has_error() and reply.error.code == ErrorCode.MESSAGE_UNAVAILABLE:
        return None  # its time ran out; whoever waits knows that by himself
    if reply.has_error() and reply.error.code == ErrorCode.NODE_UNAVAILABLE:
        return AWAY
    if reply.has_error():
        return f"it failed ({plain(reply.error.reason)})"
    try:
        return from_records(reply.content)
    except BadMessage as bad:
        return str(bad)
