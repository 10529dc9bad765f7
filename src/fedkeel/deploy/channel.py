"""Requests and replies as NVFlare's tasks: the channel of a server whose sites are NVFlare's clients."""

import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from queue import Empty, Queue
from typing import Any

from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable

from fedkeel.core.messages import BadMessage, reading
from fedkeel.engine.executors.sites.channel import Reply, Table, plain
from fedkeel.stopping import Stopped, stop_requested

REQUEST = "fedkeel"  # the name of every task
TABLE, MESSAGE = "table", "message"
LARGEST_TABLE = 4 * 2**20
POLL = 0.05  # seconds


def packed(table: Table, message: bytes) -> Shareable:
    """As text and bytes, which lie in the message itself: it has a limit, see `kits.LARGEST`. An array would be
    downloaded apart from it, and NVFlare limits no download."""
    shareable = Shareable()
    shareable[TABLE], shareable[MESSAGE] = json.dumps(table), message
    return shareable


def unpacked(shareable: Shareable) -> Reply:
    """What was packed; `BadMessage` for anything else."""
    table, message = shareable.get(TABLE), shareable.get(MESSAGE)
    if not isinstance(table, str) or not isinstance(message, bytes):
        raise BadMessage("it is not a table and a message")
    if len(table) > LARGEST_TABLE:
        raise BadMessage(f"its table has {len(table):,} bytes, more than {LARGEST_TABLE:,}")
    with reading():
        read = json.loads(table)
        if not isinstance(read, dict):
            raise BadMessage("its table is none")
        return read, message


@dataclass
class NVFlareChannel:
    """Of a `Controller`, while its `control_flow` runs."""

    controller: Controller
    context: FLContext

    def sites(self) -> list[str]:
        clients: list[Any] = self.context.get_engine().get_clients()
        return [one.name for one in clients if self.controller.get_client_disconnect_time(one.name) is None]

    def exchange(
        self, requests: Mapping[str, Table], message: bytes, timeout: float
    ) -> Iterator[tuple[str, Reply | str]]:
        came: Queue[tuple[str, Reply | str]] = Queue()

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:  # noqa: ARG001 (NVFlare names them)
            came.put((client_task.client.name, reply_of(client_task.result)))
            client_task.result = None  # it would stay in memory as long as the task

        tasks: dict[str, Task] = {}
        for name, request in requests.items():
            data, seconds = packed(request, message), math.ceil(timeout)
            tasks[name] = Task(REQUEST, data, timeout=seconds, result_received_cb=received)
            self.controller.broadcast(tasks[name], self.context, targets=[name], min_responses=1)
        deadline = time.monotonic() + timeout
        try:
            while tasks and time.monotonic() < deadline:
                if stop_requested.is_set():
                    raise Stopped
                try:
                    name, reply = came.get(timeout=POLL)
                except Empty:
                    for name in [name for name, task in tasks.items() if task.completion_status in LOST]:
                        del tasks[name]
                        yield name, "its connection was lost"
                    continue
                if tasks.pop(name, None) is not None:
                    yield name, reply
        finally:
            for task in tasks.values():
                self.controller.cancel_task(task)


LOST = (TaskCompletionStatus.CLIENT_DEAD, TaskCompletionStatus.ERROR)


def reply_of(result: Any) -> Reply | str:
    """A site's reply, or what is wrong with it."""
    if not isinstance(result, Shareable):
        return "its reply is none"
    if (code := result.get_return_code(ReturnCode.OK)) != ReturnCode.OK:
        return f"its NVFlare says {plain(code)}"
    try:
        return unpacked(result)
    except BadMessage as bad:
        return str(bad)
