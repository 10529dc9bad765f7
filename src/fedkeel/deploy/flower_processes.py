"""What Fedkeel puts in the place of parts of Flower inside Flower's own processes, SuperLink and SuperNode.

With `flower_internals`, which is for Fedkeel's processes, and `pieces` this is all that leans on Flower's inner parts.
What an interface of Flower's own would have to offer, so that a part of this file could go:

    run_superlink/node  processes that are given their middleware, their socket, their pauses, their clients and what
                        signs requests
    free_removed_keys   a node that is removed and whose key may be registered again
    limit_store         a hook before a message, or a piece of one, is stored
    write_less          a database that is not written to for every piece of a message
    Straight            a server that does not pass every piece of a message through nine middlewares
"""

import importlib
import inspect
import os
import time
from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

from fastapi import HTTPException
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from fedkeel.deploy.flower_internals import NEWS
from fedkeel.deploy.pieces import Carrying, attach, attached, gather
from fedkeel.deploy.quota import Quota

SECOND = 1.0
FOR_SERVER = "/v1/runtime/"
NODE = "fedkeel.node"  # in the scope of a request: the node whose key it is signed with
ANNOUNCES, FETCHES, PIECE = "push-messages", "pull-messages", "push-object"
OFTEN = ("messages", "object", "received", "nodes", "heartbeat")  # ends of paths that are asked for in every round


def run_superlink(serve: Callable[[Any, Any, dict[str, Any]], None]) -> None:
    """`serve` gets Flower's ASGI app, its configuration (host, port, TLS) and how to log."""
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import console_handler
    from flwr.superlink.main import create_app

    cli: Any = importlib.import_module("flwr.superlink.cli.flower_superlink")

    def serve_app(lifespan_config: Any) -> None:
        app = create_app(lifespan_config, cli.SuperLinkLifespan)
        serve(app, lifespan_config, get_uvicorn_log_config(console_handler.level))

    cli._run_superlink_http_api = serve_app
    cli.flower_superlink()


def run_supernode(interceptor: type, pauses: Any) -> None:
    """Flower's SuperNode; the process that started it is told when a message has come."""
    from flwr.supernode import fleet_http_connection, start_client_internal
    from flwr.supernode.cli import flower_supernode

    fleet: Any = fleet_http_connection
    usual, connect = start_client_internal._push_messages, fleet.FleetHttpClient.from_server_address
    stores: list[Any] = []

    def push_messages(state: Any, object_store: Any, send: Any, push_object: Any) -> None:
        stores[:] = [object_store]
        os.write(int(os.environ[NEWS]), b".")
        pauses.begin()
        usual(state, object_store, send, push_object)

    def connect_carrying(*words: Any, **options: Any) -> Any:
        return closing(Carrying(connect(*words, **options), lambda identity: stores[0].get(identity)))

    start_client_internal._push_messages = push_messages
    start_client_internal.time = pauses  # type: ignore[attr-defined]
    fleet.FleetHttpClient = SimpleNamespace(from_server_address=connect_carrying)
    fleet.NodeAuthHttpInterceptor = interceptor
    flower_supernode()


def free_removed_keys() -> None:
    """A key that was removed may be added again: Flower would keep it for ever, and refuse it as one already in use."""
    from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
    from flwr.supercore.state.schema.linkstate_models import Node
    from flwr.supercore.utils import uint64_to_int64
    from sqlalchemy import update

    usual = SqlLinkState.delete_node

    def delete_node(self: Any, owner_aid: str, node_id: int) -> None:
        usual(self, owner_aid, node_id)
        with self.session() as session:
            session.execute(update(Node).where(Node.node_id == uint64_to_int64(node_id)).values(public_key=None))

    SqlLinkState.delete_node = delete_node  # type: ignore[method-assign]


def limit_store(quota: Quota) -> None:
    """Have Flower's process ask the quota before it stores anything."""
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.superlink.servicer.fleet import fleet_handlers
    from flwr.superlink.servicer.runtime import runtime_handlers

    send, announce, store = runtime_handlers.push_object, fleet_handlers.push_messages, fleet_handlers.push_object

    def sent(request: Any, state: Any, task: Any) -> Any:
        quota.sent(request.session_id, len(request.object_content))
        return send(request, state, task)

    def announced(request: Any, state: Any) -> Any:
        node = request.node.node_id
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise HTTPException(400, "One reply at a time.")
        metadata, tree = request.messages_list[0].metadata, request.message_object_trees[0]
        pieces = sum(1 for _ in iterate_object_tree(tree))
        earlier = quota.check(node, metadata.src_node_id, metadata.message_id, tree.object_id, pieces)
        if earlier and state.get_valid_message_ins(metadata.reply_to_message_id) is not None:
            state.object_store.delete(earlier)  # before: else its pieces would be in the store, and not counted
        answer = announce(request=request, state=state)
        if tree.object_id in state.object_store:
            quota.announced(node, tree.object_id, answer.session_id)
        return answer

    def stored(request: Any, state: Any) -> Any:
        quota.take(request.node.node_id, request.session_id, len(request.object_content), state.object_store.delete)
        return store(request=request, state=state)

    runtime_handlers.push_object = sent
    fleet_handlers.push_messages, fleet_handlers.push_object = announced, stored


def write_less() -> None:
    """With every piece of a message Flower's process looks for apps that have died, and adds up bytes that nobody
    reads, each in a transaction of its database. One look in a second is enough; the sums are left out."""
    from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState

    usual, looked = SqlLinkState._cleanup_expired_task_tokens, [-SECOND]

    def look(self: Any) -> None:
        if time.monotonic() - looked[0] >= SECOND:
            looked[0] = time.monotonic()
            usual(self)

    SqlLinkState._cleanup_expired_task_tokens = look  # type: ignore[method-assign]
    SqlLinkState.store_traffic = lambda *_, **__: None  # type: ignore[method-assign]


class Straight:
    """Flower's ASGI app; but what is asked for in every round, by a site or by the server, goes to its handler at once:
    on the way through FastAPI and nine middlewares it would take four times as long as what is done for it."""

    def __init__(self, app: Any) -> None:
        from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
        from flwr.supercore.routers.runtime.router import router as for_server
        from flwr.superlink.routers.fleet.router import router as for_sites

        self.app, self.state = app, app.state
        self._ways: dict[str, tuple[Any, Any, list[str]]] = {}
        for route in (*for_sites.routes, *for_server.routes):
            path = getattr(route, "path", "")
            if path.rsplit("-", 1)[-1] in OFTEN:
                handler = inspect.unwrap(route.endpoint)  # type: ignore[attr-defined]
                wanted = [*inspect.signature(handler).parameters]
                self._ways[path] = (PROTOBUF_REQUEST_TYPES["POST", path], handler, wanted)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        from flwr.supercore.error import http_error_translator

        known = NODE in scope or scope.get("path", "").startswith(FOR_SERVER)
        if not known or scope["path"] not in self._ways or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        asked = Request(scope, receive)
        body = await asked.body()
        answer = await http_error_translator(asked, lambda _: run_in_threadpool(self._handle, asked, body))
        await answer(scope, receive, send)

    def _handle(self, asked: Any, body: bytes) -> Any:
        from flwr.supercore.constant import TASK_TOKEN_HEADER
        from flwr.supercore.dependencies.task import authenticate_task
        from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
        from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware

        path = asked.scope["path"]
        kind, _, wanted = self._ways[path]
        request = ProtobufTranslationMiddleware._parse_request(body, kind)
        if NODE in asked.scope and request.node.node_id != asked.scope[NODE]:
            raise HTTPException(401, "Invalid SuperNode authentication")
        given = {"request": request, "state": self.state.linkstate_factory.state()}
        given["handlers"] = self.state.runtime_handlers
        if "task" in wanted:
            given["task"] = authenticate_task(asked, asked.headers.get(TASK_TOKEN_HEADER), given["state"])
        answer = self._call(path, given)
        if path.endswith(ANNOUNCES):
            self._store(path, answer, given)
        elif path.endswith(FETCHES):
            attach(answer, gather(answer.message_object_trees, given["state"].object_store.get))
        return Response(answer.SerializeToString(), media_type=PROTOBUF_MEDIA_TYPE)

    def _call(self, path: str, given: dict[str, Any]) -> Any:
        _, handler, wanted = self._ways[path]
        return handler(**{name: given[name] for name in wanted})

    def _store(self, path: str, answer: Any, given: dict[str, Any]) -> None:
        """The pieces that came with the message, as if each had come in a request of its own."""
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.proto.message_pb2 import PushObjectRequest
        from flwr.proto.node_pb2 import Node

        request, way = given["request"], path.removesuffix(ANNOUNCES) + PIECE
        sender = request.node if "node" in request.DESCRIPTOR.fields_by_name else Node(node_id=SUPERLINK_NODE_ID)
        piece = PushObjectRequest(node=sender, session_id=answer.session_id)
        piece.run_id = request.messages_list[0].metadata.run_id
        for identity, content in attached(request).items():
            piece.object_id, piece.object_content = identity, content
            if identity in answer.objects_to_push and self._call(way, {**given, "request": piece}).stored:
                answer.objects_to_push.remove(identity)
