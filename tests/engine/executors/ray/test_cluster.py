"""The cluster that a run is spread over: addresses that are none, who has how much room, and who shares it."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedkeel.config import Config
from fedkeel.engine.executors.ray import cluster
from fedkeel.engine.executors.ray.cluster import ADDRESS, SHARE, Cluster, Node, explained, runs_at_once, share, slots
from fedkeel.errors import FedkeelError
from tests import tiny
from tests.engine.executors.ray.pretend import pretend


def node(cores: int, gpus: float = 0.0) -> Node:
    return Node("id", "name", cores, gpus, 10**9)


# -- addresses ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "address", ["", "nonsense", "10.0.0.5", ":6379", "host:", "host:0", "host:65536", "host:port", "ray://host:10001"]
)
def test_an_address_that_makes_no_sense(address: str) -> None:
    with pytest.raises(FedkeelError) as refused:
        cluster.refuse_silent(address)
    assert str(refused.value) == (
        f"'ray_address' is '{address}': give 'local', 'auto' or HOST:PORT, like '10.0.0.5:6379'."
    )


@contextmanager
def answering(reply: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of somebody who does this with whoever comes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                reply(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def refusal(address: str) -> str:
    with pytest.raises(FedkeelError) as refused:
        cluster.refuse_silent(address)
    text = str(refused.value)
    assert text.startswith(f"No Ray cluster answers at '{address}' (")
    assert text.endswith(f"'ray start --head --port {address.rpartition(':')[2]}', or leave '--ray-address' out.")
    return text


def test_an_address_where_nobody_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    assert "(Connection refused)" in refusal(address)


def test_a_name_that_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: Any, **__: Any) -> socket.socket:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", connect)
    assert "(Name or service not known)" in refusal("nobody.example:6379")


def test_somebody_who_says_nothing_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "ANSWER", 0.2)
    asked = threading.Event()
    with answering(lambda _: asked.wait(60.0) and None) as address:
        assert "(timed out)" in refusal(address)
        asked.set()


@pytest.mark.parametrize("reply", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n", b""])
def test_somebody_else_at_the_address(reply: bytes) -> None:
    def answer(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(reply)

    with answering(answer) as address:
        assert "(something else is there)" in refusal(address)


def test_somebody_who_speaks_its_language_is_ray() -> None:
    def answer(connection: socket.socket) -> None:
        if connection.recv(100).startswith(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"):
            connection.sendall(bytes([0, 0, 12, 4, 0, 0, 0, 0, 0]) + bytes(12))

    with answering(answer) as address:
        cluster.refuse_silent(address)


def test_a_run_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = pretend(monkeypatch)
    monkeypatch.setattr(world, "is_initialized", lambda: False)
    with pytest.raises(FedkeelError, match="'ray_address' is 'nonsense'"):
        tiny.run(tmp_path / "run", executor="ray", ray_address="nonsense")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("address", "starts", "ends"),
    [
        ("auto", "No Ray cluster runs on this machine (", "or leave it out."),
        ("host:1", "The Ray cluster there cannot be used from here (", "with the same Ray and Python."),
        ("local", "Ray cannot be started here (", "choose another executor."),
    ],
)
def test_what_ray_says_at_length_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, address: str, starts: str, ends: str
) -> None:
    world = pretend(monkeypatch)

    def init(**_: Any) -> None:
        raise ConnectionError("It went wrong.\n" * 50)

    monkeypatch.setattr(world, "is_initialized", lambda: False)
    monkeypatch.setattr(world, "init", init, raising=False)
    monkeypatch.setattr(cluster, "refuse_silent", lambda _: None)
    with pytest.raises(FedkeelError) as refused:
        Cluster(address)
    text = str(refused.value)
    assert text.startswith(starts)
    assert text.endswith(ends)
    assert "\n" not in text
    assert len(text) < 420


def test_only_errors_of_ray_are_explained() -> None:
    for error in (KeyboardInterrupt(), FedkeelError("A sentence.")):
        with pytest.raises(type(error)) as raised, explained("It cannot be", "leave it"):
            raise error
        assert raised.value is error


def test_without_ray_its_executor_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else find(name, *more))
    with pytest.raises(FedkeelError, match=r"ray.* is not installed: 'pip install fedkeel\[ray\]'") as refused:
        tiny.run(tmp_path / "run", executor="ray")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


# -- nodes -------------------------------------------------------------------------------------------------------------
def test_nodes_of_one_host_have_names_of_their_own_and_keep_them(monkeypatch: pytest.MonkeyPatch) -> None:
    world = pretend(monkeypatch, ["aaaaaaaaaa", "bbbbbbbbbb"])
    plain = world.nodes
    monkeypatch.setattr(world, "nodes", lambda: [entry | {"NodeManagerHostname": "host"} for entry in plain()])
    here = Cluster("local")
    assert [one.name for one in here.nodes()] == ["host/aaaaaa", "host/bbbbbb"]
    world.gone.add("bbbbbbbbbb")
    assert [one.name for one in here.nodes()] == ["host/aaaaaa"]
    assert [one.name for one in Cluster("local").nodes()] == ["host"]


@pytest.mark.parametrize(
    ("nodes", "options", "expected"),
    [
        ([node(8), node(4)], {"ray_cores": 4}, 3),
        ([node(8), node(3)], {"ray_cores": 4}, 2),
        ([node(8), node(4)], {"device": "cpu"}, 12),
        ([node(8, 2), node(64, 1)], {}, 3),
        ([node(8, 2), node(64, 1)], {"ray_gpus": 0.5}, 6),
        ([node(8, 2), node(64, 1)], {"ray_gpus": 0.3}, 9),
        ([node(8, 2), node(64)], {"device": "cpu", "ray_cores": 8}, 9),
        ([node(0)], {}, 0),
    ],
)
def test_room_for_actors(nodes: list[Node], options: dict[str, Any], expected: int) -> None:
    assert slots(nodes, Config(**options)) == expected


def test_how_many_runs_have_room_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    world = pretend(monkeypatch)
    world.cores = {"alpha": 6, "beta": 2}
    options: dict[str, Any] = {"executor": "ray", "ray_address": "auto", "device": "cpu"}
    assert runs_at_once(Config(**options)) == 8
    assert runs_at_once(Config(**options, ray_cores=2, ray_actors=2)) == 2
    assert runs_at_once(Config(**options, ray_cores=7)) == 1


@pytest.mark.parametrize("before", [None, "elsewhere:1"])
def test_runs_side_by_side_are_told_where_and_how_much(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    world = pretend(monkeypatch)
    world.cores = {"alpha": 4, "beta": 4}
    monkeypatch.setattr(Cluster, "address", "10.0.0.5:6379")
    for name in (ADDRESS, SHARE):
        monkeypatch.delenv(name, raising=False)
    if before:
        monkeypatch.setenv(ADDRESS, before)
    config = Config(executor="ray", ray_address="auto", device="cpu", ray_cores=2)
    with cluster.shared(config, 3):
        assert os.environ[ADDRESS] == "10.0.0.5:6379"
        assert share() == 1  # of four actors that there is room for
    assert os.environ.get(ADDRESS) == before
    assert share() == 0
    with cluster.shared(config, 2):
        assert share() == 2
    with cluster.shared(config.replace(ray_actors=3), 2):
        assert share() == 3
    with cluster.shared(config, 1):
        assert share() == 0  # all of it
    with pytest.raises(KeyError), cluster.shared(config, 1):
        raise KeyError
    assert os.environ.get(ADDRESS) == before
