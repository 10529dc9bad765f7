"""Requests and replies as Flower's messages.

A message holds a small table, as JSON in a `ConfigRecord`, and the bytes of a Broadcast or an Update (safetensors).
Large ones are an `Array`: Flower cuts it into pieces and stores equal ones once, so a broadcast to twenty sites lies on
the server once. Small ones lie beside the table: each piece of a message is a request of its own, and a transaction in
the database of Flower's process, which costs more than their bytes do.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from queue import Empty, Queue
from typing import Any

import httpx
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fedkeel.core.messages import BadMessage, reading
from fedkeel.deploy import flower_internals
from fedkeel.engine.executors.flower.channel import AWAY, POLL, Reply, Table, largest_reply, next_look, pause, plain

TABLE, BYTES = "fedkeel", "fedkeel.tensors"
SAFETENSORS = "fedkeel.safetensors"
LARGEST_TABLE = 4 * 2**20
SMALL = 2**20  # bytes
KINDS = {"train": MessageType.TRAIN, "evaluate": MessageType.EVALUATE}


def to_records(table: Table, message: bytes) -> RecordDict:
    beside = {"message": message} if 0 < len(message) <= SMALL else {}
    records = RecordDict({TABLE: ConfigRecord({"table": json.dumps(table), **beside})})
    if message and not beside:
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
        beside = given[TABLE].get("message", b"")
        if not isinstance(table, dict) or not isinstance(beside, bytes) or (array and array.stype != SAFETENSORS):
            raise BadMessage("its reply is not one of fedkeel's")
        return table, bytes(array.data) if array is not None else beside


def reply_to(message: Message, records: RecordDict) -> Message:
    """A reply is as old as what it replies to: the moment at which it was made is one of this machine's clock, by which
    the server's might have run out before, or not have begun."""
    reply = Message(records, reply_to=message)
    reply.metadata.created_at, reply.metadata.ttl = message.metadata.created_at, message.metadata.ttl
    return reply


class GridChannel:
    """A `Channel` over the grid that Flower gives to a ServerApp.

    Each reply is fetched by itself: one that cannot be read, or is never complete, is nobody else's business.
    """

    def __init__(self, grid: Any) -> None:
        self._grid = grid

    def nodes(self) -> list[int]:
        return sorted(self._grid.get_node_ids())

    def exchange(
        self, requests: Mapping[int, Table], message: bytes, timeout: float
    ) -> Iterator[tuple[int, Reply | str]]:
        messages = [
            Message(to_records(request, message), node, KINDS.get(request["do"], MessageType.QUERY), ttl=timeout)
            for node, request in requests.items()
        ]
        ids = flower_internals.push(self._grid, messages) if messages else []
        waiting = {node: number for number, node in zip(ids, requests, strict=False) if number}
        for node in [node for node in requests if node not in waiting]:
            yield node, "the message to it could not be sent"
        came: Queue[tuple[int, Reply | str | httpx.TransportError]] = Queue()
        over, deadline, most = threading.Event(), time.monotonic() + timeout, largest_reply(len(message))
        many = max(1.0, len(waiting) / 10)  # Flower's process has to answer them all

        def look(node: int, number: str) -> None:
            began = time.monotonic()
            while not over.is_set() and time.monotonic() < deadline:
                reply = self._fetch(number, most, deadline)
                if reply is not None:
                    came.put((node, reply))
                    return
                over.wait(many * next_look(time.monotonic() - began))

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
                if not isinstance(reply, str):
                    ids.remove(waiting[node])  # who replied had it, and said so to Flower, which deleted it then
                del waiting[node]
                yield node, reply
        finally:
            over.set()
            flower_internals.forget(self._grid, [number for number in ids if number])

    def _fetch(self, number: str, most: int, deadline: float) -> Reply | str | httpx.TransportError | None:
        try:
            reply = flower_internals.fetch(self._grid, number, most, deadline)
            return read_message(reply) if isinstance(reply, Message) else reply
        except httpx.TransportError as gone:  # Flower's own process, not the site
            return gone
        except Exception as error:  # whatever the objects of a stranger make Flower do
            return f"its reply cannot be read ({type(error).__name__})"


def read_message(reply: Message) -> Reply | str | None:
    if reply.has_error() and reply.error.code == flower_internals.EXPIRED:
        return None  # whoever waits knows by himself that its time ran out
    if reply.has_error() and reply.error.code == flower_internals.UNREACHABLE:
        return AWAY
    if reply.has_error():
        return f"it failed ({plain(reply.error.reason)})"
    try:
        return from_records(reply.content)
    except BadMessage as bad:
        return str(bad)
