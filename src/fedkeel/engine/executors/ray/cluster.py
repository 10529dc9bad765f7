"""The Ray cluster that a run is spread over: found, or started for it; one sentence where that cannot be."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from fedkeel.config import Config
from fedkeel.engine.threads import available_cores
from fedkeel.errors import FedkeelError, first_line
from fedkeel.stopping import undisturbed

ADDRESS, SHARE = "FEDKEEL_RAY_ADDRESS", "FEDKEEL_RAY_ACTORS"  # what runs side by side are told by their parent
ANSWER = 5.0  # seconds that an address may take to answer
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # an empty frame of HTTP/2: length, kind, flags and stream
REFUSALS = {  # whether the address was "auto"
    True: (
        "No Ray cluster runs on this machine",
        "start one with 'ray start --head', join one with 'ray start --address=HOST:PORT', or leave it out.",
    ),
    False: (
        "The Ray cluster there cannot be used from here",
        "this machine must be one of its nodes ('ray start --address=HOST:PORT'), with the same Ray and Python.",
    ),
}
ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # Ray's own 15 has clients starve beside anything else; only where it is started here
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray would otherwise warn of
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


@dataclass(frozen=True)
class Node:
    """A machine of the cluster, or what Ray takes for one."""

    id: str
    name: str
    cores: int
    gpus: float
    store: int  # bytes of its object store


def lacks_ray() -> str:
    found = "ray" in sys.modules or importlib.util.find_spec("ray") is not None
    return "" if found else "needs ray, which is not installed: 'pip install fedkeel[ray]'."


def slots(nodes: Sequence[Node], config: Config) -> int:
    """Actors that these have room for: one for each GPU, or share of one, or for each group of cores."""
    gpus = sum(int(node.gpus / config.ray_gpus + 1e-9) for node in nodes) if config.device != "cpu" else 0
    return gpus or sum(node.cores // max(1, config.ray_cores) for node in nodes)


def runs_at_once(config: Config) -> int:
    """How many runs the cluster has room for, of one actor each or of as many as they ask for."""
    if config.ray_address == "local":  # not started yet
        nodes = [Node("", "", available_cores(), torch.cuda.device_count(), 0)]
    else:
        cluster = Cluster(config.ray_address)
        nodes = cluster.nodes()
        cluster.close()
    return max(1, slots(nodes, config) // max(1, config.ray_actors))


@contextmanager
def shared(config: Config, jobs: int) -> Iterator[None]:
    """Inside, runs of this process and of its children are on one cluster; of several at once each has its share."""
    cluster = Cluster(config.ray_address)
    given = {ADDRESS: cluster.address}
    if jobs > 1:
        given[SHARE] = str(config.ray_actors or max(1, slots(cluster.nodes(), config) // jobs))
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        cluster.close()


def share() -> int:
    """The most actors of a run that is one of several; 0: all."""
    return int(os.environ.get(SHARE, 0))


class Cluster:
    """A connection to Ray. `address`: "local" starts one for this process, "auto" is the one of this machine."""

    def __init__(self, address: str) -> None:
        address = os.environ.get(ADDRESS, address)
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import ray

        self._own = self._connected = False
        self._names: dict[str, str] = {}
        if ray.is_initialized():  # by whoever called: theirs to end
            return
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
        if address == "local":
            self._own = True
            with undisturbed(), explained("Ray cannot be started here", "choose another executor."):
                ray.init(address="local", num_cpus=available_cores(), include_dashboard=False, **quiet)
        else:
            if address != "auto":
                refuse_silent(address)
            with undisturbed(), explained(*REFUSALS[address == "auto"]):
                ray.init(address=address, **quiet)
        self._connected = True
        with suppress(AttributeError):  # Ray prints a page about each process that dies; a run says it in a sentence
            ray._private.worker.print_to_stdstream = lambda *_, **__: None

    @property
    def address(self) -> str:
        import ray

        return str(ray.get_runtime_context().gcs_address)

    @property
    def here(self) -> str:
        """The id of the node that this process is on."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def nodes(self) -> list[Node]:
        """Those that are alive."""
        import ray

        alive = [entry for entry in ray.nodes() if entry["Alive"]]
        hosts = Counter(entry["NodeManagerHostname"] for entry in alive)
        return [self._node(entry, hosts) for entry in alive]

    def _node(self, entry: Mapping[str, Any], hosts: Counter[str]) -> Node:
        host, has = entry["NodeManagerHostname"], entry["Resources"]
        short = host if hosts[host] == 1 else f"{host}/{entry['NodeID'][:6]}"
        name = self._names.setdefault(entry["NodeID"], short)  # it keeps the name that it was first told of by
        store = int(has.get("object_store_memory", 0))
        return Node(entry["NodeID"], name, int(has.get("CPU", 0)), float(has.get("GPU", 0)), store)

    def close(self) -> None:
        if not self._connected:
            return
        import ray

        self._connected = False
        with undisturbed():
            folder = self._own and _session_folder()
            ray.shutdown()
            if folder:
                shutil.rmtree(folder, ignore_errors=True)  # Ray's logs of a cluster that nobody else knew of


def _session_folder() -> str:
    with suppress(Exception):
        import ray

        return str(ray._private.worker._global_node.get_session_dir_path())
    return ""


def refuse_silent(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or not 0 < int(port) < 65536 or not host or "/" in host:
        raise FedkeelError(f"'ray_address' is '{address}': give 'local', 'auto' or HOST:PORT, like '10.0.0.5:6379'.")
    try:
        with socket.create_connection((host, int(port)), timeout=ANSWER) as connection:
            if "RAY_USE_TLS" not in os.environ:
                _greet(connection)
    except OSError as error:
        raise FedkeelError(
            f"No Ray cluster answers at '{address}' ({error.strerror or first_line(error)}): start one there with "
            f"'ray start --head --port {port}', or leave '--ray-address' out."
        ) from error


def _greet(connection: socket.socket) -> None:
    """Ray speaks gRPC, so HTTP/2, which begins with settings on both sides; for anything else it would wait minutes."""
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS)
    if connection.recv(9)[3:4] != SETTINGS[3:4]:
        raise OSError("something else is there")


class explained:  # noqa: N801
    """Around Ray's own errors, of which each would be a page."""

    def __init__(self, what: str, advice: str) -> None:
        self._what, self._advice = what, advice

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, FedkeelError):
            return
        said = " ".join(str(error).split())
        why = said if len(said) < 200 else f"{said[:200]} ..."
        raise FedkeelError(f"{self._what} ({why.rstrip('.') or type(error).__name__}): {self._advice}") from error
