"""The executor `ray`: clients on every GPU, or on the cores, of a Ray cluster, on as many machines as it has.

An actor has a worker and runs clients by an executor of its own machine: `cuda` on a GPU, `serial` on cores. Images,
model and method are put into Ray's object store once, a broadcast once a round; what a client remembers stays there,
and the driver holds a reference. An actor that dies, with its node or alone, is replaced where there is room, and what
it had to do is given to another one. Nodes that join are used from the next round on.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedkeel
from fedkeel.config import Config
from fedkeel.core import imports
from fedkeel.core.messages import Broadcast, Missing, broadcast_from_bytes, broadcast_to_bytes
from fedkeel.core.state import Tensors
from fedkeel.data.federation import Federation
from fedkeel.engine.executors.executor import EXECUTORS, Executor, available_cores, executor_class
from fedkeel.engine.executors.parts import explained, memory_from_bytes, packed, results, unpacked
from fedkeel.engine.local import Worker
from fedkeel.engine.tasks import LostMemory, Result, Task
from fedkeel.errors import FedkeelError, first_line
from fedkeel.stopping import LOOK, Stopped, stop_requested, undisturbed

ADDRESS = "FEDKEEL_RAY_ADDRESS"  # what runs side by side are told by their parent
ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # Ray's own 15 has clients starve beside anything else; only where it is started here
    "RAY_USAGE_STATS_ENABLED": "0",
}
TURNS = 4  # calls of an actor in a round, as far as there are clients: the last ones are waited for
DIED = "two actors of Ray died with it: it may need more memory than there is"
VERSIONS = fedkeel.__version__, torch.__version__.partition("+")[0]
log = logging.getLogger("fedkeel")


@dataclass(frozen=True)
class Kept:
    """What a client remembers, where it lies."""

    reference: Any
    client: str

    def __call__(self) -> Tensors:
        import ray

        try:
            return memory_from_bytes(ray.get(self.reference))
        except ray.exceptions.RayError as error:
            raise LostMemory(
                f"What '{self.client}' remembered was lost with its node ({first_line(error)})."
            ) from error


def bring(name: str, text: bytes) -> None:
    """Import a file of the user's from a copy: a node need not have it."""
    if name not in imports.imported():
        copy = Path(tempfile.mkdtemp(prefix="fedkeel-code-")) / name
        copy.write_bytes(text)
        imports.load(copy)


class Station:
    """An actor. What it raises is an error of the run; only a process that dies is Ray's to tell of."""

    def __init__(
        self,
        versions: tuple[str, str],
        code: Sequence[tuple[str, bytes]],
        references: Sequence[Any],
        on_gpu: bool,
    ) -> None:
        import ray

        if versions != VERSIONS:
            raise FedkeelError(f"A node has fedkeel and torch {VERSIONS}, and the run {versions}: install the same.")
        for name, text in code:
            bring(name, text)
        config, method, model, watching, images, own = ray.get(references[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # they lie in the store, where nobody may write
            federation = Federation(images=torch.from_numpy(images), **own)
        device = torch.device("cuda" if on_gpu else "cpu")
        worker = Worker(config, federation, method, model, device, watching=watching)
        side_by_side = not executor_class("cuda").cannot_run(config, device)
        self._executor: Executor = EXECUTORS.build("cuda" if side_by_side else "serial", worker)
        self._broadcast: tuple[Any, Broadcast] = (None, Broadcast(0, 0, {}, {}))

    def ready(self) -> None:
        """It has begun."""

    def do(self, tasks: Sequence[Task], sent: Sequence[Any]) -> list[Any]:
        """A result and a memory for each task, one after another. References in lists are fetched here, not by Ray."""
        import ray

        found: dict[str, Result[Any] | Missing] = {}
        with explained(lambda: next(task.client for task in tasks if task.client not in found)):
            if self._broadcast[0] != sent[0]:
                self._broadcast = sent[0], broadcast_from_bytes(ray.get(sent[0]).tobytes())
            for result in self._executor.map(tasks, self._broadcast[1]):
                found[result.client] = result
        return [item for task in tasks for item in packed(found[task.client])]


@EXECUTORS.register("ray")
class RayExecutor(Executor):
    """Every GPU, or all cores, of a Ray cluster: an actor on each, which runs `cuda` or `serial`."""

    elsewhere = True

    @classmethod
    def cannot_run(cls, config: Config, device: torch.device) -> str:  # noqa: ARG003
        found = "ray" in sys.modules or importlib.util.find_spec("ray") is not None
        return "" if found else "needs ray, which is not installed: 'pip install fedkeel[ray]'."

    def __init__(self, worker: Worker) -> None:
        self.worker, self.config = worker, worker.config
        self._own = connect(self.config.ray_address)
        import ray

        names = [entry.name for entry in fields(Federation) if entry.name != "images"]
        own = {name: getattr(worker.federation, name) for name in names}
        config = self.config.replace(threads=self.config.threads or max(1, self.config.ray_cores))
        parts = (config, worker.method, worker.model, worker.watching)
        self._references = [ray.put((*parts, worker.federation.images.numpy(), own))]
        self._code = [(file.name, file.read_bytes()) for file in imports.files(self.config)]
        self._actors: list[Any] = []
        self._beginning: dict[Any, Any] = {}  # those that are not ready, by the answer that says when
        self._failure = "The Ray cluster has no room for an actor: give fewer '--ray-cores', or another address."
        try:
            self._muster()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        import ray

        with undisturbed():
            for actor in (*self._actors, *self._beginning.values()):
                ray.kill(actor)
            self._actors, self._beginning = [], {}
            if self._own:
                ray.shutdown()

    # -- the actors ------------------------------------------------------------------------------------------
    def _muster(self) -> None:
        """Begin actors where the cluster has room for more; wait until there is one at least."""
        import ray

        config, alive = self.config, [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = sum(int(node.get("GPU", 0)) for node in alive) if config.device != "cpu" else 0
        if config.device.startswith("cuda") and not gpus:
            raise FedkeelError(f"'device' is '{config.device}', and the Ray cluster has no GPU: give '--device cpu'.")
        cores = max(1, config.ray_cores)
        wanted = gpus or sum(int(node.get("CPU", 0)) // cores for node in alive)
        taken = {"num_cpus": 0, "num_gpus": 1} if gpus else {"num_cpus": cores}
        kind = ray.remote(**taken)(Station)
        for _ in range(min(wanted, config.ray_actors or wanted) - len(self._actors) - len(self._beginning)):
            actor = kind.remote(VERSIONS, self._code, self._references, bool(gpus))
            self._beginning[actor.ready.remote()] = actor
        self._welcome(0)
        while not self._actors:
            if not self._beginning:
                raise FedkeelError(self._failure)
            if stop_requested.is_set():
                raise Stopped
            self._welcome(LOOK)

    def _welcome(self, seconds: float) -> None:
        """Those that are ready by then can be given work."""
        import ray

        awaited = list(self._beginning)
        for answer in ray.wait(awaited, num_returns=len(awaited), timeout=seconds)[0] if awaited else ():
            actor = self._beginning.pop(answer)
            try:
                ray.get(answer)
            except ray.exceptions.RayActorError as error:
                reason = str(error).strip().splitlines()[-1].rstrip(".")
                self._failure = f"An actor of Ray could not begin: {reason}."
                log.warning(self._failure)
            else:
                self._actors.append(actor)

    # -- tasks -----------------------------------------------------------------------------------------------
    def map(self, tasks: Sequence[Task], broadcast: Broadcast) -> Iterator[Result[Any] | Missing]:
        import ray

        self._muster()
        sent = [ray.put(np.frombuffer(broadcast_to_bytes(broadcast), dtype=np.uint8))]
        return results(tasks, self.worker, partial(self._attempt, sent), DIED)

    def _attempt(
        self, sent: Sequence[Any], tasks: Mapping[int, Task], alone: bool
    ) -> Iterator[tuple[int, Result[Any] | Missing | None]]:
        """A few clients in a call; two calls at an actor, so that the next is there when one ends."""
        import ray

        waiting, last, depth = list(tasks), time.monotonic(), 1 if alone else 2
        at_once = 1 if alone else -(-len(tasks) // (TURNS * len([*self._actors, *self._beginning])))
        calls: dict[Any, tuple[Any, list[int], list[Any]]] = {}  # by the first of a call's replies
        while waiting or calls:
            if stop_requested.is_set():
                raise Stopped
            for actor in self._actors * depth:
                if waiting and sum(of is actor for of, *_ in calls.values()) < depth:
                    numbers, waiting = waiting[:at_once], waiting[at_once:]
                    do = actor.do.options(num_returns=2 * len(numbers))
                    replies = do.remote([tasks[number] for number in numbers], sent)
                    calls[replies[0]] = actor, numbers, replies
            done, _ = ray.wait(list(calls), timeout=LOOK)
            self._welcome(0)
            if not done and time.monotonic() - last > self.config.round_timeout:
                for actor, *_ in calls.values():
                    ray.kill(actor)  # it hangs
            for first in done:
                last = time.monotonic()
                actor, numbers, replies = calls.pop(first)
                try:
                    whole = ray.get(replies[::2])
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError):  # it died, perhaps with its node
                    if actor in self._actors:
                        self._actors.remove(actor)
                        ray.kill(actor)  # where it is only what it sent that was lost
                        self._muster()
                    yield from ((number, None) for number in numbers)
                    continue
                for number, result, memory in zip(numbers, whole, replies[1::2], strict=True):
                    yield number, unpacked(tasks[number], result, Kept(memory, tasks[number].client))


def connect(address: str) -> bool:
    """To the cluster there; whether this process is now the one to leave it."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    address = os.environ.get(ADDRESS, address)
    import ray

    if ray.is_initialized():  # by whoever called: theirs to end
        return False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    local = {"num_cpus": available_cores(), "include_dashboard": False} if address == "local" else {}
    try:
        with undisturbed():
            ray.init(address=address, **local, **quiet)
    except Exception as error:
        said = " ".join(str(error).split())[:200].rstrip(".")
        advice = "choose another executor." if local else "start one with 'ray start --head', and give its HOST:PORT."
        raise FedkeelError(f"There is no Ray at '{address}' ({said}): {advice}") from error
    return True


@contextmanager
def shared(address: str) -> Iterator[None]:
    """Inside, runs of this process and of its children are on one cluster."""
    own = connect(address)
    import ray

    os.environ[ADDRESS] = ray.get_runtime_context().gcs_address
    try:
        yield
    finally:
        del os.environ[ADDRESS]
        if own:
            ray.shutdown()
