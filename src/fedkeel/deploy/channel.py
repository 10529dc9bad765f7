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
from nvflare.apis.signal import Signal

from fedkeel.core.messages import BadMessage
from fedkeel.engine.executors.sites.channel import Reply, Table, plain, unpacked
from fedkeel.stopping import Stopped

REQUEST = "fedkeel"  # the name of every task
TABLE, MESSAGE = "table", "message"
LOOK = 0.05  # seconds
LOST = (TaskCompletionStatus.CLIENT_DEAD, TaskCompletionStatus.ERROR)


def packed(table: Table, message: bytes) -> Shareable:
    """As text and bytes, which lie in the message itself: it has a limit, see `kits.LARGEST`. An array would be
    downloaded apart from it, and NVFlare limits no download."""
    shareable = Shareable()
    shareable[TABLE], shareable[MESSAGE] = json.dumps(table), message
    return shareable


def content_of(shareable: Any) -> Reply:
    """What was packed; `BadMessage` for anything else."""
    if not isinstance(shareable, Shareable):
        raise BadMessage("its reply is none")
    if (code := shareable.get_return_code(ReturnCode.OK)) != ReturnCode.OK:
        raise BadMessage(f"its NVFlare says {plain(code)}")
    return unpacked(shareable.get(TABLE), shareable.get(MESSAGE))


@dataclass
class NVFlareChannel:
    """Of a `Controller`, while its `control_flow` runs."""

    controller: Controller
    context: FLContext
    abort: Signal

    def sites(self) -> list[str]:
        self._refuse_to_go_on()
        clients: list[Any] = self.context.get_engine().get_clients()
        return [one.name for one in clients if self.controller.get_client_disconnect_time(one.name) is None]

    def exchange(
        self, requests: Mapping[str, Table], message: bytes, timeout: float
    ) -> Iterator[tuple[str, Reply | str]]:
        came: Queue[tuple[str, Reply | str]] = Queue()

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:  # noqa: ARG001 (NVFlare names them)
            try:
                came.put((client_task.client.name, content_of(client_task.result)))
            except BadMessage as bad:
                came.put((client_task.client.name, str(bad)))
            client_task.result = None  # it would stay in memory as long as the task

        tasks: dict[str, Task] = {}
        for name, request in requests.items():
            seconds = math.ceil(timeout)
            tasks[name] = Task(REQUEST, packed(request, message), timeout=seconds, result_received_cb=received)
            self.controller.broadcast(tasks[name], self.context, targets=[name], min_responses=1)
        deadline = time.monotonic() + timeout
        try:
            while tasks and time.monotonic() < deadline:
                self._refuse_to_go_on()
                try:
                    name, reply = came.get(timeout=LOOK)
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

    def _refuse_to_go_on(self) -> None:
        if self.abort.triggered:
            raise Stopped
