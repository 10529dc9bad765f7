"""Flower's tasks inside Fedkeel's own processes, in place of processes that Flower would start for each of them.

A ServerApp then shows its progress where `fedkeel server` runs, a site keeps its images and its model in memory from
one message to the next, and no code that came over the network is ever run: a task is taken for its messages alone,
the app bundle that comes with it is not even unpacked. This file, `link` and `quota` lean on Flower's inner parts; the
extra `flower` pins the version they are of.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from flwr.app import Message
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import NodeStatus, TaskType
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedkeel.config import from_one
from fedkeel.deploy.grid import GridChannel, from_records, read_reply, to_records
from fedkeel.deploy.link import SECRET, pass_word
from fedkeel.deploy.site import Site
from fedkeel.engine.executors.flower.gathering import Reply, Table, plain
from fedkeel.stopping import stop_requested

log = logging.getLogger("fedkeel")
LAST_REPLY = 10.0  # seconds
ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})


class Known:
    """Shows with each request that it is one of the server's own: see `link`."""

    def __init__(self, secret: bytes) -> None:
        self._word = pass_word(secret)

    def intercept(self, context: Any, call_next: Any) -> Any:
        context.request.headers[SECRET] = self._word
        return call_next(context)


@dataclass(frozen=True)
class Endpoint:
    """A Flower process on this machine: where it listens, whose certificate it shows, the secret it shares with us."""

    address: str
    ca: Path | None
    secret: bytes

    def client(self, kind: Any, *interceptors: Any, retry: bool = True) -> Any:
        verify: Any = True
        if self.ca is not None:
            # The certificate is made out to the name that sites use, and this is the same machine by another name.
            verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            verify.check_hostname = False
            verify.load_verify_locations(cafile=str(self.ca))
        scheme = "http" if self.ca is None else "https"
        client = kind(
            f"{scheme}://{self.address}",
            interceptors=[RuntimeVersionHttpInterceptor(component_name="fedkeel"), Known(self.secret), *interceptors],
            verify=verify,
            retry_invoker=make_simple_http_retry_invoker() if retry else None,
        )
        client.close()
        # The same, but what stays on this machine, with a secret in it, goes by no proxy.
        client._client = httpx.Client(verify=verify, timeout=client._client.timeout, trust_env=False)
        return client

    def tasks(self, kind: str, pauses: Callable[[], None]) -> Iterator[str]:
        """The token of one task after another."""
        client = self.client(
            RuntimeHttpClient,
            SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods=ACQUIRE),
            retry=False,
        )
        try:
            while True:
                with suppress(httpx.TransportError):  # it is not up yet, or is going down, which the caller watches
                    answer = client.AcquireTask(AcquireTaskRequest(supported_task_types={kind}))
                    if answer.HasField("task") and answer.token:
                        yield answer.token
                        continue
                pauses()
        finally:
            client.close()

    @contextmanager
    def task(self, token: str, lost: Callable[[], None]) -> Iterator[Any]:
        """A client for one task; Flower is told that it is alive, and `lost` is called when Flower has given it up."""
        client = self.client(RuntimeHttpClient, RuntimeTokenHttpInterceptor(token))

        def beat() -> bool:
            try:
                alive = client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success
            except httpx.TransportError:
                return False
            except httpx.HTTPStatusError:
                alive = False
            if not alive:
                lost()
            return True

        heartbeat = HeartbeatSender(beat)
        heartbeat.start()
        try:
            yield client
        finally:
            heartbeat.stop()
            client.close()


# -- the server -------------------------------------------------------------------------------------------------
def is_up(endpoint: Endpoint) -> bool:
    client = endpoint.client(ControlHttpClient, retry=False)
    try:
        client.ListNodes(ListNodesRequest())
    except httpx.HTTPError:
        return False
    finally:
        client.close()
    return True


def register(endpoint: Endpoint, keys: Mapping[str, bytes]) -> dict[int, str]:
    """Let exactly these sites in, by their public keys; returns which node is whose."""
    client = endpoint.client(ControlHttpClient)
    try:
        nodes = client.ListNodes(ListNodesRequest()).nodes_info
        known = {bytes(n.public_key): n.node_id for n in nodes if n.status != NodeStatus.UNREGISTERED}
        owners: dict[int, str] = {}
        for name, key in keys.items():
            node = known.pop(key, None) or client.RegisterNode(RegisterNodeRequest(public_key=key, name=name)).node_id
            owners[node] = name
        for node in known.values():
            client.UnregisterNode(UnregisterNodeRequest(node_id=node))
        return owners
    finally:
        client.close()


def start_run(endpoint: Endpoint, app: Mapping[str, bytes]) -> None:
    content, _ = build_fab_from_files(app)
    client = endpoint.client(ControlHttpClient)
    try:
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        client.StartRun(StartRunRequest(fab=fab_to_proto(fab)))
    finally:
        client.close()


def serve(endpoint: Endpoint, pauses: Callable[[], None], act: Callable[[GridChannel], None]) -> None:
    """Take the run that was started and do `act` as its ServerApp."""
    token = next(endpoint.tasks(TaskType.SERVER_APP, pauses))
    with endpoint.task(token, lost=stop_requested.set) as client:
        status, details = SubStatus.FAILED, "stopped"
        try:
            given = client.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
            TaskIdentity.node_id = given.context.node_id
            grid = HttpGrid(endpoint.address, insecure=endpoint.ca is None, token=token)
            grid._client = client
            grid.set_run(run_from_proto(given.run))
            act(guarded(grid))
            status, details = SubStatus.COMPLETED, ""
        finally:
            with suppress(httpx.HTTPError):
                client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=details))


def guarded(grid: Any) -> GridChannel:
    """A channel over this grid. Where it goes over a network, replies are measured while they come."""
    if not isinstance(grid, HttpGrid):
        return GridChannel(grid)
    return GridChannel(grid, functools.partial(fetch, grid), functools.partial(forget, grid))


class Guard:
    """Flower's client, for one reply: gives up on one that is too large, or not complete in time.

    Flower by itself would store whatever a site sends, and wait for hours for the rest of what was cut off.
    """

    def __init__(self, client: Any, most: int, deadline: float) -> None:
        self._client, self._most, self._deadline = client, most, deadline
        self._bytes, self._lock = 0, threading.Lock()
        self.refusal = ""
        self.replies: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def PullMessages(self, request: Any) -> Any:  # noqa: N802 - Flower's name
        answer = self._client.PullMessages(request)
        self.replies += [message.metadata.message_id for message in answer.messages_list]
        return answer

    def PullObject(self, request: Any) -> Any:  # noqa: N802 - Flower's name
        part = self._client.PullObject(request)
        with self._lock:
            self._bytes += len(part.object_content)
            if self._bytes > self._most:
                self.refusal = f"its reply has more than {self._most:,} bytes"
            elif not part.object_found:  # what is far too large, Flower's process did not even keep: see `quota`
                self.refusal = self.refusal or f"its reply is cut off: it may have {self._most:,} bytes"
            elif not part.object_available and time.monotonic() > self._deadline:
                self.refusal = "its reply was not complete in time"
        if self.refusal:
            raise ObjectPullError(request.object_id, self.refusal)
        return part


def fetch(grid: HttpGrid, number: str, most: int, deadline: float) -> Reply | str | None:
    """The reply to one message, if there is one yet."""
    one: Any = copy.copy(grid)
    one._client = guard = Guard(grid._runtime_client, most, deadline)
    replies = list(one.pull_messages([number]))
    if guard.refusal:
        forget(grid, guard.replies)
    return guard.refusal or (read_reply(replies[0]) if replies else None)


def forget(grid: HttpGrid, numbers: list[str]) -> None:
    """Delete what is left of these messages: one that nobody fetched holds the whole model until the run ends."""
    for number in numbers:
        with suppress(httpx.HTTPError):
            grid._runtime_client.ConfirmMessageReceived(
                ConfirmMessageReceivedRequest(node=grid.node, run_id=grid.run.run_id, message_object_id=number)
            )


# -- a site -----------------------------------------------------------------------------------------------------
def answer_all(endpoint: Endpoint, site: Site, pauses: Callable[[], None]) -> None:
    """Reply to one message after another, until `pauses` raises.

    Each in a thread of its own, since Flower waits for hours for the rest of a message whose server was killed; but
    the site does one thing at a time.
    """
    busy = threading.Lock()
    try:
        for token in endpoint.tasks(TaskType.CLIENT_APP, pauses):
            threading.Thread(target=answer_one, args=(endpoint, site, token, busy), daemon=True).start()
    finally:
        busy.acquire(timeout=LAST_REPLY)  # what is under way ends by itself when the site is asked to stop


def reply_of(records: Any, message: Message) -> Message:
    """A reply is as old as what it replies to: the moment at which it was made is one of this machine's clock, by which
    the server's might have run out before, or not have begun."""
    reply = Message(records, reply_to=message)
    reply.metadata.created_at, reply.metadata.ttl = message.metadata.created_at, message.metadata.ttl
    return reply


def answer_one(endpoint: Endpoint, site: Site, token: str, busy: threading.Lock) -> None:
    with endpoint.task(token, lost=lambda: None) as client:
        status, details, context = SubStatus.FAILED, "the reply could not be sent", None
        try:
            message, context, _, _ = pull_task_input(client)
            table, data = from_records(message.content)
            with busy:
                log.info(heard(table))
                reply = site.reply(table, data)
            push_message(client, reply_of(to_records(*reply), message), context)
            status, details = SubStatus.COMPLETED, ""
        except Exception as error:  # whatever it is, the next message comes
            log.warning("A message could not be replied to: %s.", str(error).rstrip("."))
        finally:
            push_task_output(client, context, status, details)


def heard(request: Table) -> str:
    """What a server asks for, as a line of the site's log: the words are a stranger's."""
    step = request.get("step")
    number = from_one(step[0]) if isinstance(step, list) and step and type(step[0]) is int else "-"
    return f"{plain(request.get('do'))[:40]}, round {number}"
