"""What Fedkeel leans on in Flower is there, takes what it is given, and is leant on in one place.

When one of these fails, Flower has changed: look at `flower_internals`, `flower_processes` and `pieces`.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

import httpx

import fedkeel
from fedkeel.deploy import flower_internals as inner
from fedkeel.deploy import flower_processes, pieces

PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp"}
ROOT = Path(fedkeel.__file__).parent
SUPERLINK = "flwr.superlink.cli.flower_superlink"
ROUTER = "flwr.superlink.routers.fleet.router"
HANDLERS = "flwr.superlink.servicer"

# What is called or replaced, and the names of what it takes.
SIGNATURES = {
    "flwr.cli.build:build_fab_from_files": ["files"],
    "flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.delete_node": ["self", "owner_aid", "node_id"],
    "flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState._cleanup_expired_task_tokens": ["self"],
    "flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState.store_traffic": ["self", "run_id"],
    "flwr.supercore.date:now": [],
    "flwr.supercore.fab:Fab": ["hash_str", "content", "verifications"],
    "flwr.supercore.heartbeat:HeartbeatSender": ["heartbeat_fn"],
    "flwr.supercore.http_logging:get_uvicorn_log_config": ["log_level"],
    "flwr.supercore.interceptors:RuntimeTokenHttpInterceptor": ["token"],
    "flwr.supercore.primitives.asymmetric:sign_message": ["private_key", "message"],
    "flwr.supercore.primitives.asymmetric:verify_signature": ["public_key", "message", "signature"],
    "flwr.superlink.main:create_app": ["config", "superlink_lifespan_class"],
    f"{SUPERLINK}:_run_superlink_http_api": ["lifespan_config"],
    f"{HANDLERS}.fleet.fleet_handlers:push_messages": ["request", "state"],
    f"{HANDLERS}.fleet.fleet_handlers:push_object": ["request", "state"],
    f"{HANDLERS}.runtime.runtime_handlers:push_object": ["request", "state", "task"],
    "flwr.supernode.fleet_http_connection:NodeAuthHttpInterceptor": ["private_key", "public_key"],
    "flwr.supernode.start_client_internal:_push_messages": ["state", "object_store", "send", "push_object"],
    "flwr.supernode.runtime.run_clientapp:pull_task_input": ["client"],
    "flwr.supernode.runtime.run_clientapp:push_message": ["client", "message", "context"],
    "flwr.supernode.runtime.run_clientapp:push_task_output": ["client", "context", "sub_status", "details"],
}


def found(place: str) -> Any:
    module, _, path = place.partition(":")
    thing: Any = importlib.import_module(module)
    for name in path.split("."):
        thing = getattr(thing, name)
    return thing


@pytest.mark.parametrize("place", SIGNATURES)
def test_what_is_called_or_replaced_takes_what_it_took(place: str) -> None:
    assert list(inspect.signature(found(place)).parameters)[: len(SIGNATURES[place])] == SIGNATURES[place]


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        ("flwr.supercore.control.control_http_client:ControlHttpClient",
         ["ListNodes", "RegisterNode", "UnregisterNode", "StartRun"]),
        ("flwr.supercore.runtime:RuntimeHttpClient",
         ["AcquireTask", "SendTaskHeartbeat", "PullTaskInput", "PushTaskOutput", "PullMessages", "PullObject",
          "ConfirmMessageReceived"]),
    ],
)  # fmt: skip
def test_a_client_of_flower_sends_over_the_connection_that_it_has(kind: str, calls: list[str]) -> None:
    """Which is replaced by one that goes by no proxy and shows the secret."""
    client = inner.Endpoint("127.0.0.1:1", None, b"secret").client(found(kind), retry=False)
    assert all(callable(getattr(client, call)) for call in calls)
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(403)

    client._client._transport = httpx.MockTransport(answer)
    with pytest.raises(httpx.HTTPStatusError):
        getattr(client, calls[0])(inner.control_pb2.ListNodesRequest())
    assert asked[0].headers[inner.SECRET] == inner.password(b"secret")


def test_flower_asks_one_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner.date, "datetime", inner.date.datetime)  # put back at the end
    inner.use_clock(lambda: 1_800_000_000.0)
    assert found("flwr.superlink.routers.fleet.node_auth:now")().timestamp() == 1_800_000_000.0
    assert found("flwr.superlink.grid.http_grid:now")().timestamp() == 1_800_000_000.0


def test_flower_looks_for_what_is_replaced_where_it_is_replaced() -> None:
    """A name that another module had imported before would keep its old meaning there."""
    replaced = {
        SUPERLINK: "_run_superlink_http_api(",
        "flwr.supernode.fleet_http_connection": "NodeAuthHttpInterceptor(",
        "flwr.supernode.start_client_internal": "_push_messages(",
    }
    assert "with FleetHttpClient.from_server_address(" in inspect.getsource(
        importlib.import_module("flwr.supernode.fleet_http_connection")
    )
    for module, call in replaced.items():
        assert call in inspect.getsource(importlib.import_module(module)).replace(f"def {call}", "")
    router = inspect.getsource(importlib.import_module(ROUTER))
    assert "fleet_handlers.push_messages(request=request, state=state)" in router
    assert "fleet_handlers.push_object(request=request, state=state)" in router
    handlers = importlib.import_module(f"{HANDLERS}.runtime.runtime_handlers")
    assert found("flwr.superlink.main:_RUNTIME_HANDLERS") is handlers


def test_pauses_are_those_that_are_replaced() -> None:
    pulls = [inner.inflatable_utils.pull_objects, inner.inflatable_utils.pull_and_inflate_object_from_tree]
    assert [pull.__kwdefaults__["initial_backoff"] for pull in pulls] == [inner.SOON] * 2
    node = inspect.getsource(importlib.import_module("flwr.supernode.start_client_internal"))
    assert set(re.findall(r"\btime\.\w+\([^)]*\)", node)) == {"time.sleep(3)", "time.sleep(0.5)"}


def test_a_task_that_flower_has_given_up_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower's own way to try again ends it; of a site that was frozen, all would end for one message."""
    killed: list[int] = []
    monkeypatch.setattr("os.kill", lambda _, number: killed.append(number))
    request = httpx.Request("POST", "http://here/v1/runtime/pull-object")
    refusal = httpx.HTTPStatusError("refused", request=request, response=httpx.Response(401, request=request))
    cut_off = httpx.ConnectError("[SSL: UNEXPECTED_EOF_WHILE_READING] EOF occurred in violation of protocol")
    tries: list[Exception] = [refusal, httpx.ConnectError("not up yet"), cut_off]

    def ask() -> None:
        raise tries.pop()

    with pytest.raises(httpx.HTTPStatusError):
        inner.patient().invoke(ask)
    assert killed == []
    assert tries == [], "what can pass was tried again"


def test_the_state_of_a_superlink_has_what_is_asked_of_it() -> None:
    state = found("flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState")
    for name in ("get_node_id_by_public_key", "get_valid_message_ins", "object_store", "session", "delete_node"):
        assert hasattr(state, name)
    source = inspect.getsource(found("flwr.superlink.main:create_app"))
    for name in ("linkstate_factory", "enable_supernode_auth"):
        assert f"fastapi_app.state.{name} = " in source
    grid = inner.HttpGrid("127.0.0.1:1", insecure=True, token="a token")
    assert hasattr(grid, "_client")
    assert isinstance(inspect.getattr_static(inner.HttpGrid, "_runtime_client"), property)
    assert (inner.OLDEST, inner.NEWEST) == (-305, 5), "the page on deployment says so"


def test_the_paths_of_sites_are_those_that_are_guarded() -> None:
    paths = [route.path for route in found(f"{ROUTER}:router").routes]
    assert {inner.FIRST_REQUEST, inner.PULL, inner.PUSH_REPLY} <= set(paths)
    runtime = [route.path for route in found("flwr.supercore.routers.runtime.router:router").routes]
    assert {inner.PUSH, inner.PULL_REPLIES} <= set(runtime)
    assert all(path.startswith(inner.FOR_SITES) for path in paths)


@pytest.mark.slow
def test_the_messages_of_a_superlink_are_in_these_tables(tmp_path: Path) -> None:
    manager = found("flwr.superlink.config_loader:get_federation_manager")()
    _, factory = found("flwr.superlink.config_loader:get_objectstore_linkstate_factories")(
        str(tmp_path / "link.db"), manager
    )
    factory.state()
    with sqlite3.connect(tmp_path / "link.db") as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    assert set(inner.MESSAGE_TABLES) <= tables
    others = {name for name in tables if "message" in name or "object" in name} - set(inner.MESSAGE_TABLES)
    assert others == {"message", "task_message", "objectstore_locks"}, "which hold no model of a server's"


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.slow
def test_nothing_else_leans_on_what_is_not_flower_s_public_interface() -> None:
    own = {Path(inner.__file__), Path(flower_processes.__file__), Path(pieces.__file__)}
    others = [path for path in ROOT.rglob("*.py") if path not in own]
    leaning = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in others
        for name in imported(path)
        if name.partition(".")[0] == "flwr" and name not in PUBLIC
    }
    assert not leaning
