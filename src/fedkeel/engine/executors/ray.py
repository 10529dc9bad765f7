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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedkeel
from fedkeel.config import Config
from fedkeel.core import imports
from fedkeel.core.messages import Broadcast, Missing, broadcast_from_bytes, broadcast_to_bytes, pack, unpack
from fedkeel.core.state import Tensors
from fedkeel.data.federation import Federation
from fedkeel.engine.executors.executor import EXECUTORS, Executor, available_cores
from fedkeel.engine.executors.parts import Reply, in_parts, read, reply_of, told
from fedkeel.engine.local import Worker
from fedkeel.engine.tasks import LostMemory, Result, Task, fetched
from fedkeel.errors import FedkeelError, TrainingError, first_line
from fedkeel.stopping import LOOK, Stopped, stop_requested, undisturbed

ADDRESS = "FEDKEEL_RAY_ADDRESS"  # what runs side by side are told by their parent
ENVIRONMENT = {
    "RAY_worker_niceness": "0",  # Ray's own 15 has clients starve beside anything else; only where it is started here
    "RAY_USAGE_STATS_ENABLED": "0",
}
TURNS = 4  # calls of an actor in a round, as far as there are clients: the last ones are waited for
ATTEMPTS = 3  # actors that a client may be given to
ALL = 30.0  # seconds that the first of several actors waits for the others
log = logging.getLogger("fedkeel")


@dataclass(frozen=True)
class Kept:
    """What a client remembers, where it lies."""

    reference: Any
    client: str

    def __call__(self) -> Tensors:
        import ray

        try:
            return unpack(ray.get(self.reference))[1].get("memory", {})
        except ray.exceptions.RayError as error:
            raise LostMemory(
                f"What '{self.client}' remembered was lost with its node ({first_line(error)})."
            ) from error


def bring(module: imports.OwnModule, text: bytes) -> None:
    """Import a module of the user's from a copy: a node need not have the file."""
    if module.missing():
        copy = Path(tempfile.mkdtemp(prefix="fedkeel-code-")) / f"{module.name.rpartition('.')[2]}.py"
        copy.write_bytes(text)
        imports.load_file(copy)


class Station:
    """An actor. Whatever goes wrong here is told as part of a reply; only a process that dies is Ray's to tell of."""

    def __init__(
        self, code: Sequence[tuple[imports.OwnModule, bytes]], references: Sequence[Any], threads: int, on_gpu: bool
    ) -> None:
        import ray

        for module, text in code:
            bring(module, text)
        parts, images = ray.get(list(references))
        config, method, model, gradients, watching, own = parts
        torch.set_num_threads(threads)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # they lie in the store, where nobody may write
            federation = Federation(images=torch.from_numpy(images), **own)
        device = torch.device("cuda" if on_gpu else "cpu")
        worker = Worker(config, federation, method, model, device, gradient_rule=gradients, watching=watching)
        captured = on_gpu and config.dp != "local"  # each step needs noise of its own
        self._executor: Executor = EXECUTORS.build("cuda" if captured else "serial", worker)
        self._broadcast: tuple[Any, Broadcast | None] = (None, None)

    def ready(self) -> tuple[str, str]:
        return fedkeel.__version__, torch.__version__.partition("+")[0]

    def do(self, tasks: Sequence[Task], memories: Sequence[Any], broadcast: Sequence[Any]) -> list[Any]:
        """A reply and a memory for each task, one after another. References in lists are fetched here, not by Ray."""
        import ray

        found, failed = dict[str, Any](), (Reply(), b"")
        try:
            if self._broadcast[0] != broadcast[0]:
                self._broadcast = broadcast[0], broadcast_from_bytes(ray.get(broadcast[0]).tobytes())
            there = self._broadcast[1]
            assert there is not None
            asked = [replace(task, memory=taken(one, task.client)) for task, one in zip(tasks, memories, strict=True)]
            for result in self._executor.map(asked, there):
                found[result.client] = result
        except Exception as error:
            failed = told(error)
        replies = [reply_of(task, found[task.client]) if task.client in found else failed for task in tasks]
        return [item for reply, memory in replies for item in (reply, memory)]


@EXECUTORS.register("ray")
class RayExecutor(Executor):
    """Every GPU, or all cores, of a Ray cluster: an actor on each, which runs `cuda` or `serial`."""

    elsewhere = True

    @classmethod
    def cannot_run(cls, device: torch.device) -> str:  # noqa: ARG003
        found = "ray" in sys.modules or importlib.util.find_spec("ray") is not None
        return "" if found else "needs ray, which is not installed: 'pip install fedkeel[ray]'."

    @classmethod
    def suits(cls, config: Config) -> bool:  # noqa: ARG003
        return False  # it is chosen by name

    def __init__(self, worker: Worker) -> None:
        self.worker, self.config = worker, worker.config
        self._own = connect(self.config.ray_address)
        import ray

        names = [entry.name for entry in fields(Federation) if entry.name != "images"]
        own = {name: getattr(worker.federation, name) for name in names}
        parts = (self.config, worker.method, worker.model, worker.gradient_rule, worker.watching, own)
        self._code = [(module, imports.text_of(module)) for module in imports.homes(self.config)]
        self._references = [ray.put(parts), ray.put(worker.federation.images.numpy())]
        self._actors: list[Any] = []
        self._begun: dict[Any, Any] = {}  # those that are not ready, by the answer that says when
        try:
            self._muster()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        import ray

        with undisturbed():
            for actor in (*self._actors, *self._begun.values()):
                ray.kill(actor)
            self._actors, self._begun = [], {}
            if self._own:
                ray.shutdown()

    # -- the actors ------------------------------------------------------------------------------------------
    def _muster(self) -> None:
        """Begin actors where the cluster has room for more; wait until there is one at least."""
        import ray

        config, alive = self.config, [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = sum(int(node.get("GPU", 0) / config.ray_gpus + 1e-9) for node in alive) if config.device != "cpu" else 0
        if config.device.startswith("cuda") and not gpus:
            raise FedkeelError(f"'device' is '{config.device}', and the Ray cluster has no GPU: give '--device cpu'.")
        cores = max(1, config.ray_cores)
        wanted = gpus or sum(int(node.get("CPU", 0)) // cores for node in alive)
        more = min(wanted, config.ray_actors or wanted) - len(self._actors) - len(self._begun)
        kind = ray.remote(num_cpus=0 if gpus else cores, num_gpus=config.ray_gpus if gpus else 0)(Station)
        for _ in range(more):
            actor = kind.remote(self._code, self._references, cores, bool(gpus))
            self._begun[actor.ready.remote()] = actor
        until = time.monotonic() + (ALL if more > 0 and not self._actors else 0)
        while self._begun and (not self._actors or time.monotonic() < until):
            if stop_requested.is_set():
                raise Stopped
            self._welcome(ray.wait(list(self._begun), timeout=LOOK)[0])
        self._welcome(ray.wait(list(self._begun), num_returns=len(self._begun), timeout=0)[0] if self._begun else ())
        if not self._actors:
            raise FedkeelError(
                "The Ray cluster has no room for an actor: give fewer '--ray-cores', or another address."
            )

    def _welcome(self, ready: Sequence[Any]) -> None:
        import ray

        ours = fedkeel.__version__, torch.__version__.partition("+")[0]
        for answer in ready:
            actor = self._begun.pop(answer)
            try:
                theirs = ray.get(answer)
            except ray.exceptions.RayActorError as error:  # its node is gone, or has other code
                log.warning("An actor of Ray could not begin: %s.", str(error).strip().splitlines()[-1].rstrip("."))
                continue
            if theirs != ours:
                raise FedkeelError(
                    f"A node of the Ray cluster has fedkeel {theirs[0]} and torch {theirs[1]}, and here are {ours[0]} "
                    f"and {ours[1]}: install the same."
                )
            self._actors.append(actor)

    # -- tasks -----------------------------------------------------------------------------------------------
    def map(self, tasks: Sequence[Task], broadcast: Broadcast) -> Iterator[Result[Any] | Missing]:
        import ray

        self._muster()
        sent = [ray.put(np.frombuffer(broadcast_to_bytes(broadcast), dtype=np.uint8))]
        return in_parts(tasks, self.worker, lambda parts: self._results(parts, sent))

    def _results(self, tasks: Sequence[Task], sent: Sequence[Any]) -> Iterator[tuple[int, Result[Any] | Missing]]:
        import ray

        attempts = dict.fromkeys(range(len(tasks)), 0)
        waiting = list(attempts)
        at_once = -(-len(tasks) // (TURNS * max(1, len(self._actors))))
        under_way: dict[Any, tuple[Any, list[int], list[Any]]] = {}  # by the first of a call's replies
        idle = self._actors * 2  # the next call is there when the last one ends
        last = time.monotonic()
        while waiting or under_way:
            if stop_requested.is_set():
                raise Stopped
            while waiting and idle:
                count = 1 if attempts[waiting[0]] else at_once  # who may have ended an actor does not take others along
                places, waiting = waiting[:count], waiting[count:]
                actor = idle.pop()
                memories = [as_given(tasks[place].memory) for place in places]
                plain = [replace(tasks[place], memory={}) for place in places]
                replies = actor.do.options(num_returns=2 * len(places)).remote(plain, memories, sent)
                under_way[replies[0]] = actor, places, replies
            done, _ = ray.wait(list(under_way), timeout=LOOK)
            hang = not done and time.monotonic() - last > self.config.round_timeout
            for first in [first for first in (list(under_way) if hang else done) if first in under_way]:
                last = time.monotonic()
                actor, places, replies = under_way[first]
                try:
                    whole = ray.get(replies[::2], timeout=0 if hang else None)
                except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError):
                    idle = self._without(actor, idle)
                    calls = [key for key, (of, *_) in under_way.items() if of is actor]  # it was at the first of them
                    begun, *others = [under_way.pop(key)[1] for key in calls]
                    for place in begun:
                        attempts[place] += 1
                        if attempts[place] == ATTEMPTS:
                            yield place, missing(tasks[place])
                    again = [place for place in begun if attempts[place] < ATTEMPTS]
                    waiting = [*again, *chain.from_iterable(others), *waiting]
                    if waiting and not idle and not under_way:
                        self._muster()
                        idle = self._actors * 2
                    continue
                del under_way[first]
                idle.append(actor)
                for place, reply, memory in zip(places, whole, replies[1::2], strict=True):
                    yield place, read(tasks[place], reply, Kept(memory, tasks[place].client))

    def _without(self, actor: Any, idle: Sequence[Any]) -> list[Any]:
        import ray

        if actor in self._actors:
            self._actors.remove(actor)
            ray.kill(actor)
        return [other for other in idle if other is not actor]


def as_given(memory: Any) -> Any:
    """A reference as it is, tensors as bytes."""
    return memory.reference if isinstance(memory, Kept) else pack({}, memory=fetched(memory))


def taken(given: Any, client: str) -> Tensors:
    return unpack(given)[1].get("memory", {}) if isinstance(given, bytes) else Kept(given, client)()


def missing(task: Task) -> Missing:
    reason = f"{ATTEMPTS} actors of Ray died with it: it may need more memory than there is"
    if task.do == "evaluate":
        raise TrainingError(f"The evaluation of '{task.client}' failed, because {reason}.")
    return Missing(task.client, reason)


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
