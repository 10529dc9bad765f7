"""Fedkeel as a Flower app, for those who have a Flower federation; by Flower's public classes alone.

`flwr run` reads the options of a run from `[tool.flwr.app.config]`, by the names they have everywhere in Fedkeel, with
three more: `out` (the run directory; one that holds a run is resumed), `sites` (how many to wait for) and `wait` (for
how many seconds). A node's own configuration has `data` (its images, or its table), `state` (a folder for its memory),
`name`, `device` and `accept` (the file of its policy).
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedkeel.config import from_dict
from fedkeel.core.messages import BadMessage, reading
from fedkeel.data.site import OWN
from fedkeel.deploy.policy import Policy
from fedkeel.deploy.serving import Waiting, train
from fedkeel.deploy.site import Site, own_data
from fedkeel.engine.executors.sites.channel import Reply, Table, read_reply, unpacked
from fedkeel.errors import FedkeelError
from fedkeel.stopping import Stopped, stop_requested

TABLE, BYTES = "table", "tensors"
NAME = "name"  # a request of this file's own: Flower knows its nodes by numbers
PATIENCE, LOOK = 60.0, 0.5  # seconds

server_app = ServerApp()
"""The round loop as a Flower app. No example: `flwr run` starts it, from a pyproject.toml that names it."""
client_app = ClientApp()
"""One site as a Flower app, likewise."""


def to_records(table: Table, message: bytes) -> RecordDict:
    array = Array(dtype="uint8", shape=(len(message),), stype="fedkeel.safetensors", data=message)
    return RecordDict({TABLE: ConfigRecord({TABLE: json.dumps(table)}), BYTES: ArrayRecord({BYTES: array})})


def from_records(records: RecordDict) -> Reply:
    with reading():
        return unpacked(records.config_records[TABLE][TABLE], records.array_records[BYTES][BYTES].data)


@dataclass
class FlowerChannel:
    """A grid of Flower's. A node says itself what its name is; the first that says one has it."""

    grid: Grid
    known: dict[int, str] = field(default_factory=dict)

    def sites(self) -> list[str]:
        there = set(self.grid.get_node_ids())
        self.known = {node: name for node, name in self.known.items() if node in there}
        new = there - self.known.keys()
        for node, reply in self._send({node: {"do": NAME} for node in new}, b"", PATIENCE) if new else ():
            try:
                with read_reply(reply, 2**20) as (table, _):
                    name = str(table[NAME])[:200]
            except BadMessage:
                continue
            if name not in self.known.values():
                self.known[node] = name
        return sorted(self.known.values())

    def exchange(
        self, requests: Mapping[str, Table], message: bytes, timeout: float
    ) -> Iterator[tuple[str, Reply | str]]:
        nodes = {node: requests[name] for node, name in self.known.items() if name in requests}
        for node, reply in self._send(nodes, message, timeout):
            yield self.known[node], reply

    def _send(self, requests: Mapping[int, Table], message: bytes, timeout: float) -> Iterator[tuple[int, Reply | str]]:
        kind, deadline = MessageType.QUERY, time.monotonic() + timeout
        sent = [Message(to_records(table, message), dst_node_id=n, message_type=kind) for n, table in requests.items()]
        waiting = set(self.grid.push_messages(sent))
        while waiting and time.monotonic() < deadline:
            for reply in self.grid.pull_messages(list(waiting)):
                waiting.discard(reply.metadata.reply_to_message_id)
                yield reply.metadata.src_node_id, content_of(reply)
            if waiting and stop_requested.wait(LOOK):
                raise Stopped


def content_of(reply: Message) -> Reply | str:
    if reply.has_error():
        return f"its Flower says: {str(reply.error.reason)[:200]}"
    try:
        return from_records(reply.content)
    except BadMessage as bad:
        return str(bad)


def main(grid: Grid, context: Context) -> None:
    """The ServerApp: the ordinary round loop over the nodes of the grid."""
    given: dict[str, Any] = {name.replace("-", "_"): value for name, value in context.run_config.items()}
    out, sites, wait = str(given.pop("out", "")), int(given.pop("sites", 0)), float(given.pop("wait", 600))
    train(FlowerChannel(grid), from_dict(given), out or None, Waiting(sites, wait))


def answer(message: Message, context: Context) -> Message:
    """One request. The site stays in this process for the next one, where there is a next one."""
    site = site_of(tuple(sorted(context.node_config.items())))
    table, data = from_records(message.content)
    reply = ({NAME: site.name}, b"") if table.get("do") == NAME else site.reply(table, data)
    return Message(to_records(*reply), reply_to=message)


@lru_cache(maxsize=16)
def site_of(node_config: tuple[tuple[str, Any], ...]) -> Site:
    node = {name: str(value) for name, value in node_config}
    if not {"data", "state"} <= node.keys():
        raise FedkeelError("A node needs 'data', its images, and 'state', a folder: give both in its configuration.")
    path = Path(node["data"]).expanduser()
    name = node.get("name") or path.resolve().name
    policy = Policy.read(Path(node["accept"]).expanduser()) if "accept" in node else Policy()
    own = {option: value for option, value in node_config if option in OWN}
    state = Path(node["state"]).expanduser()
    return Site(own_data(path, name, **own), state, name, node.get("device", "auto"), policy=policy)


server_app.main()(main)
client_app.query()(answer)
