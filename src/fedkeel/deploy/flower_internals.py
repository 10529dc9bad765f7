"""All that leans on Flower's inner parts: what Fedkeel calls, replaces or reads of Flower that is not its public API.

This file is for Fedkeel's own processes, `flower_processes` for Flower's, `pieces` for both. The extra `flower` pins
the version that they are of, and a test fails when one of these parts changes. Nothing else imports more of Flower than
`flwr.app`, `flwr.clientapp` and `flwr.serverapp`. What an interface of Flower's own would have to offer, so that a part
of this file could go:

    use_clock, now      a source of time that can be given, in place of one that all modules share
    signer, signature   a check of a request's signature by its headers alone, before the body is read
    has_*, PULL, PUSH   an answer that waits until there is a message
    SOON, patient       pauses that can be chosen, and a refusal that is an error like others
    MESSAGE_TABLES      a SuperLink that can be started without the messages of an earlier start
    Endpoint            runs, nodes and tasks of apps for a process that is already running, over a connection it gives
    *_app, *_task       the grid, or the message, of such a task
    NEWS                a node that tells its app of a message
    push                a message that is sent with its pieces
    fetch, forget       a reply with a limit of its size and its time; deleting what nobody waits for any more
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import ssl
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
from flwr.app import Message
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE, ErrorCode, SubStatus
from flwr.common.serde import fab_to_proto, run_from_proto
from flwr.proto import control_pb2, runtime_pb2
from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.supercore import constant, date, interceptors
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError
from flwr.supercore.primitives import asymmetric
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedkeel.deploy.connections import SECRET, password
from fedkeel.deploy.pieces import Carrying

EXPIRED, UNREACHABLE = ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE  # errors in place of a reply
SIGNED = (constant.FLEET_HTTP_PUBLIC_KEY_HEADER, constant.FLEET_HTTP_SIGNATURE_HEADER, TIMESTAMP_HEADER)
OLDEST, NEWEST = -TIMESTAMP_TOLERANCE - SYSTEM_TIME_TOLERANCE, SYSTEM_TIME_TOLERANCE  # seconds, of a signature
ACQUIRE = frozenset({"/flwr.proto.Runtime/AcquireTask"})
CLIENT_APP = constant.TaskType.CLIENT_APP
FOR_SITES, FIRST_REQUEST = "/v1/fleet/", "/v1/fleet/activate-node"
PULL, PUSH = "/v1/fleet/pull-messages", "/v1/runtime/push-messages"  # a site asks for messages, the server sends them
PULL_REPLIES, PUSH_REPLY = "/v1/runtime/pull-messages", "/v1/fleet/push-messages"
SOON = 0.02  # seconds until one looks again for a piece of a message that is still on its way, at first; Flower's is 1
SECRET_FILE = "--superexec-auth-secret-file"
MORE_PORTS = "FLWR_INTERNAL_"  # variables that open further ports, which nobody guards
NEWS = "FEDKEEL_NEWS"  # a variable of Flower's processes: the descriptor to which they write when there is work
MESSAGE_TABLES = (
    "message_ins", "message_res", "object_push_session_pending", "object_push_session_roots", "object_push_sessions",
    "object_children", "run_objects", "objects",
)  # fmt: skip


for _pull in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
    _pull.__kwdefaults__ = {**(_pull.__kwdefaults__ or {}), "initial_backoff": SOON}


def use_clock(moment: Callable[[], float]) -> None:
    class Given(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Given:
            return cls.fromtimestamp(moment(), tz)

    # All of Flower asks `date.now`, which asks this.
    date.datetime = SimpleNamespace(datetime=Given, UTC=datetime.timezone.utc)  # type: ignore[assignment,attr-defined]


def now() -> float:
    return date.now().timestamp()


def signature(private: Any, public: Any, moment: float) -> dict[str, str]:
    """The headers of a node's request that was made at this moment."""
    stamp = datetime.datetime.fromtimestamp(moment, datetime.timezone.utc).isoformat()
    signed = b64encode(asymmetric.sign_message(private, stamp.encode())).decode()
    key = b64encode(asymmetric.public_key_to_bytes(public)).decode()
    return dict(zip(SIGNED, (key, signed, stamp), strict=True))


def signer(headers: Mapping[bytes, bytes], state: Any) -> tuple[bytes, int, float] | None:
    """The registered key that a request is signed with, its node, and the moment that was signed."""
    try:
        key, signed, stamp = (headers[name.lower().encode()] for name in SIGNED)
        key, signed = b64decode(key, validate=True), b64decode(signed, validate=True)
        node = state.linkstate_factory.state().get_node_id_by_public_key(key)
        if node is None or not asymmetric.verify_signature(asymmetric.bytes_to_public_key(key), stamp, signed):
            return None
        return key, node, datetime.datetime.fromisoformat(stamp.decode()).timestamp()
    except (KeyError, ValueError, TypeError, OverflowError, OSError):
        return None


def patient() -> Any:
    """Flower's way to try again; but a task that Flower has given up is over, and does not end the whole process. And a
    handshake that was cut off is no proof that there is no TLS."""
    retries = make_simple_http_retry_invoker()
    usual = retries.should_giveup

    def gives_up(error: Exception) -> bool:
        refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code == httpx.codes.UNAUTHORIZED
        cut_off = isinstance(error, httpx.ConnectError) and "EOF" in str(error)
        return refused or (not cut_off and (usual is None or usual(error)))

    retries.should_giveup = gives_up
    return retries


def has_messages(answer: bytes) -> bool:
    """Whether there is any in what Flower answers to a site that asks for them."""
    return len(PullMessagesResponse.FromString(answer).messages_list) > 0


def has_replies(answer: bytes) -> bool:
    """The same, of what it answers to the server."""
    return len(runtime_pb2.PullAppMessagesResponse.FromString(answer).messages_list) > 0


@dataclass(frozen=True)
class Endpoint:
    """A Flower process on this machine: where it listens, whose certificate it shows, the secret it shares with us."""

    address: str
    ca: Path | None
    secret: bytes

    def client(self, kind: Any, *signs: Any, retry: bool = True) -> Any:
        verify: Any = False  # without TLS; to read the machine's authorities would take a while
        if self.ca is not None:
            # The certificate is made out to the name that sites use, and this is the same machine by another name.
            verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            verify.check_hostname = False
            verify.load_verify_locations(cafile=str(self.ca))
        url = f"{'http' if self.ca is None else 'https'}://{self.address}"
        version = interceptors.RuntimeVersionHttpInterceptor(component_name="fedkeel")
        retries = patient() if retry else None
        client = kind(url, interceptors=[version, *signs], verify=verify, retry_invoker=retries)
        client.close()
        # The same, but what stays on this machine, with a secret in it, goes by no proxy.
        own = {SECRET: password(self.secret)}
        client._client = httpx.Client(headers=own, verify=verify, timeout=client._client.timeout, trust_env=False)
        return client

    def is_up(self) -> bool:
        with closing(self.client(ControlHttpClient, retry=False)) as client, suppress(httpx.HTTPError):
            client.ListNodes(control_pb2.ListNodesRequest())
            return True
        return False

    def register(self, keys: Mapping[str, bytes]) -> dict[int, str]:
        """Let exactly these sites in, by their public keys; returns which node is whose."""
        with closing(self.client(ControlHttpClient)) as client:
            nodes = client.ListNodes(control_pb2.ListNodesRequest()).nodes_info
            known = {bytes(n.public_key): n.node_id for n in nodes if n.status != constant.NodeStatus.UNREGISTERED}
            owners: dict[int, str] = {}
            for name, key in keys.items():
                request = control_pb2.RegisterNodeRequest(public_key=key, name=name)
                owners[known.pop(key, None) or client.RegisterNode(request).node_id] = name
            for node in known.values():
                client.UnregisterNode(control_pb2.UnregisterNodeRequest(node_id=node))
            return owners

    def start_run(self, app: Mapping[str, bytes]) -> None:
        content, _ = build_fab_from_files(app)
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        with closing(self.client(ControlHttpClient)) as client:
            client.StartRun(control_pb2.StartRunRequest(fab=fab_to_proto(fab)))

    def tasks(self, kind: str, pauses: Callable[[], None]) -> Iterator[str]:
        """The token of one task after another; `pauses` is called while there is none."""
        signs = interceptors.SuperExecAuthHttpInterceptor(master_secret=self.secret, protected_methods=ACQUIRE)
        with closing(self.client(RuntimeHttpClient, signs, retry=False)) as client:
            while True:
                with suppress(httpx.TransportError):  # it is not up yet, or is going down, which the caller watches
                    answer = client.AcquireTask(runtime_pb2.AcquireTaskRequest(supported_task_types={kind}))
                    if answer.HasField("task") and answer.token:
                        yield answer.token
                        continue
                pauses()

    @contextmanager
    def task(self, token: str, lost: Callable[[], None] = lambda: None) -> Iterator[Any]:
        """A client for one task; Flower is told that it is alive, and `lost` is called when Flower has given it up."""
        with closing(self.client(RuntimeHttpClient, interceptors.RuntimeTokenHttpInterceptor(token))) as client:

            def beat() -> bool:
                try:
                    alive = client.SendTaskHeartbeat(runtime_pb2.SendTaskHeartbeatRequest()).success
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


@contextmanager
def server_app(endpoint: Endpoint, pauses: Callable[[], None], lost: Callable[[], None]) -> Iterator[HttpGrid]:
    """Take the run that was started; the block is its ServerApp."""
    token = next(endpoint.tasks(constant.TaskType.SERVER_APP, pauses))
    with endpoint.task(token, lost) as client:
        status, details = SubStatus.FAILED, "stopped"
        try:
            given = client.PullTaskInput(runtime_pb2.PullTaskInputRequest())
            TaskIdentity.task_id, TaskIdentity.run_id = given.task_id, given.run.run_id
            TaskIdentity.node_id = given.context.node_id
            grid = HttpGrid(endpoint.address, insecure=endpoint.ca is None, token=token)
            grid._client = client
            grid.set_run(run_from_proto(given.run))
            yield grid
            status, details = SubStatus.COMPLETED, ""
        finally:
            with suppress(httpx.HTTPError):
                client.PushTaskOutput(runtime_pb2.PushTaskOutputRequest(sub_status=status, details=details))


def answer_task(endpoint: Endpoint, token: str, answer: Callable[[Message], Message]) -> None:
    """Reply to the one message of a task of a ClientApp."""
    with endpoint.task(token) as client:
        status, details, context = SubStatus.FAILED, "the reply could not be sent", None
        try:
            message, context, _, _ = pull_task_input(client)
            push_message(client, answer(message), context)
            status, details = SubStatus.COMPLETED, ""
        finally:
            push_task_output(client, context, status, details)


class MeasuredClient:
    """Flower's client, for one reply: by itself it would take whatever a site sends, and wait for hours for the rest of
    what was cut off. Here one that has more than `most` bytes, or is not complete by the deadline, is given up."""

    def __init__(self, client: Any, most: int, deadline: float) -> None:
        self._client, self._most, self._deadline = Carrying(client), most, deadline
        self._bytes, self._lock = 0, threading.Lock()
        self.replies: list[str] = []
        self.refusal = ""

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
            elif not part.object_found:  # what is far too large, Flower's process did not even keep
                self.refusal = self.refusal or f"its reply is cut off: it may have {self._most:,} bytes"
            elif not part.object_available and time.monotonic() > self._deadline:
                self.refusal = "its reply was not complete in time"
            if self.refusal:
                raise ObjectPullError(request.object_id, self.refusal)
        return part


def push(grid: Any, messages: list[Message]) -> list[str]:
    """Send these messages; their numbers, of those that could not be sent none."""
    if not isinstance(grid, HttpGrid):
        return list(grid.push_messages(messages))
    objects: dict[str, Any] = {}

    def content_of(identity: str) -> bytes:
        for message in messages if not objects else ():
            objects.update(get_all_nested_objects(message))
        return bytes(objects[identity].deflate())

    one: Any = copy.copy(grid)
    one._client = Carrying(grid._runtime_client, content_of)
    return list(one.push_messages(messages))


def fetch(grid: Any, number: str, most: int, deadline: float) -> Message | str | None:
    """The reply to one message, if there is one yet. Where it comes over a network, it is measured while it comes."""
    if not isinstance(grid, HttpGrid):
        return next(iter(grid.pull_messages([number])), None)
    one: Any = copy.copy(grid)
    one._client = measured = MeasuredClient(grid._runtime_client, most, deadline)
    replies = list(one.pull_messages([number]))
    if measured.refusal:
        forget(grid, measured.replies)
    return measured.refusal or next(iter(replies), None)


def forget(grid: Any, numbers: list[str]) -> None:
    """Delete what is left of these messages: one that nobody fetched holds the whole model until the run ends."""
    for number in numbers if isinstance(grid, HttpGrid) else ():
        request = ConfirmMessageReceivedRequest(node=grid.node, run_id=grid.run.run_id, message_object_id=number)
        with suppress(httpx.HTTPError):
            grid._runtime_client.ConfirmMessageReceived(request)
