"""The actors of a run: started on every node that has room and can work, replaced when they die.

An actor is started in a thread of its own, which waits for it; rounds go on meanwhile with those that are there. Images
reach a node once: it reads them from the same path if they are the same, else they come through the object store.
"""

from __future__ import annotations

import io
import logging
import time
from collections import Counter
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from fedkeel.config import PYTHON_OBJECT
from fedkeel.core import imports
from fedkeel.engine.executors.ray.cluster import Cluster, Node, share
from fedkeel.engine.executors.ray.station import OwnCode, Station, Work, content, version
from fedkeel.engine.local import Worker
from fedkeel.errors import FedkeelError, TrainingError, first_line
from fedkeel.stopping import Stopped, stop_requested

log = logging.getLogger("fedkeel")
TICK = 0.2  # seconds after which the driver looks around even if nobody has said anything
MOST_STARTS = 3  # actors in a row that may die on a node before it is left alone
PATIENCE = 20.0  # seconds without any actor before that is told
LONELY = 120.0  # seconds without any node that could have one before the run ends
SLOTS = 8  # clients side by side that one GPU is given at least


class Unfit(Exception):
    """A node that cannot take part; the text says why, as the end of a sentence."""

    def __init__(self, why: str, node: str = "") -> None:
        super().__init__(why)
        self.node = node


@dataclass(eq=False)
class Seat:
    """An actor that is ready, and what it is at."""

    node: Node
    handle: Any
    width: int  # clients that it does side by side
    calls: list[Any] = field(default_factory=list)  # under way, the first one at work
    holds: list[int] = field(default_factory=list)  # places of which something is only there: in its sum, or remembered
    idle_since: float = 0.0


class Crew:
    """All actors of a run."""

    def __init__(self, worker: Worker, cluster: Cluster) -> None:
        self.worker, self.cluster, self.config = worker, cluster, worker.config
        self.seats: list[Seat] = []
        self.traffic: dict[str, Counter[str]] = {}  # by the name of a node: bytes and seconds
        self._starting: dict[futures.Future[Seat], str] = {}  # and on which node
        self._unfit: dict[str, str] = {}
        self._deaths: Counter[str] = Counter()
        self._images: dict[str, Any] = {}  # by node, once they are there
        self._locks: dict[str, Lock] = {}
        self._closed = False
        self._lonely = time.monotonic()
        self._told_lonely = False
        self._threads = futures.ThreadPoolExecutor(64, thread_name_prefix="ray actor")
        self._on_gpu = self._decide_device()
        self._own = [_own_code(module) for module in imports.homes(imports.used(self.config))]
        self._work = self._packed()
        self._expected = version()
        self._content = ""
        self._put: Any = None

    def _decide_device(self) -> bool:
        device, gpus = self.config.device, sum(node.gpus for node in self.cluster.nodes())
        if device not in ("auto", "cpu", "cuda"):
            raise FedkeelError(f"'device' is '{device}', and Ray chooses among GPUs by itself: give 'cuda' or 'cpu'.")
        if device == "cuda" and not gpus:
            raise FedkeelError("'device' is 'cuda', but no node of the Ray cluster has a GPU: choose 'cpu'.")
        return device != "cpu" and gpus > 0

    def _packed(self) -> Any:
        import ray

        worker, federation = self.worker, self.worker.federation
        fields = {name: value for name, value in vars(federation).items() if name not in ("images", "_by_name")}
        profiled = worker.clock is not None
        work = Work(*(self.config, worker.method, worker.model, fields, worker.gradients, worker.watching, profiled))
        try:
            return ray.put(_pickled(work))
        except (TypeError, AttributeError, ValueError) as error:
            raise FedkeelError(
                f"What the run is made of cannot be sent to other processes ({first_line(error)}): choose the executor "
                "'processes' or 'cuda'."
            ) from error

    # -- who is there ----------------------------------------------------------------------------------------
    def muster(self) -> None:
        """Start actors where there is room for more, also on nodes that have just come."""
        nodes = self.cluster.nodes()
        known = Counter(seat.node.id for seat in self.seats) + Counter(self._starting.values())
        limit = share() or self.config.ray_actors
        most = limit or len(nodes) * 10_000
        if limit and (self._on_gpu or share() or self.config.ray_cores):
            fit = "" not in self._unfit and any(node.id not in self._unfit for node in nodes)
            for _ in range(most - known.total() if fit else 0):  # wherever Ray finds room, beside other runs
                self._start("")
            return
        for node in nodes:
            for _ in range(min(self._room(node) - known[node.id], most - known.total())):
                self._start(node.id)
                known[node.id] += 1

    def _room(self, node: Node) -> int:
        if node.id in self._unfit:
            return 0
        if self._on_gpu:
            return int(node.gpus / self.config.ray_gpus + 1e-9)
        return node.cores // self._cores(node) if node.cores else 0

    def _cores(self, node: Node | None) -> int:
        return max(self.config.ray_cores or (node.cores if node else 1), self.config.threads)

    def attend(self) -> None:
        """Take in those that are ready; start others in the place of those that are not."""
        for started in [one for one in self._starting if one.done()]:
            place = self._starting.pop(started)
            try:
                self.seats.append(started.result())
                self._deaths[place] = 0
            except Unfit as unfit:
                self._leave_alone(unfit.node or place, str(unfit))
            except FedkeelError:
                raise
            except Exception as error:  # Ray's
                self._deaths[place] += 1
                if self._deaths[place] >= MOST_STARTS:
                    self._leave_alone(place, f"no actor can be started there ({_words(error)})")
        if self.seats:
            self._lonely, self._told_lonely = time.monotonic(), False
            return
        if not self._starting:
            self.muster()
        alone = time.monotonic() - self._lonely
        if not self._starting and (alone > LONELY or self._unfit):
            reasons = "; ".join(f"'{self._name(node)}': {why}" for node, why in self._unfit.items()) or "there is none"
            raise TrainingError(
                f"No node of the Ray cluster can take part, {reasons}: mend that and resume the run, or choose another "
                "executor."
            )
        if alone > PATIENCE and not self._told_lonely:
            self._told_lonely = True
            log.warning("Waiting for an actor: the Ray cluster has no room for one at the moment.")

    def wait(self) -> None:
        """Until there is an actor."""
        self.muster()
        if not self._starting:
            has = "; ".join(
                f"'{node.name}' has {node.cores} cores and {node.gpus:g} GPUs" for node in self.cluster.nodes()
            )
            raise FedkeelError(
                f"No node of the Ray cluster has room for an actor ({has}): give fewer 'ray_cores' or 'threads', or a "
                "smaller share 'ray_gpus'."
            )
        while not self.seats:
            if stop_requested.is_set():
                raise Stopped
            self.attend()
            futures.wait(self._starting, 0.02, futures.FIRST_COMPLETED) if self._starting else time.sleep(0.02)

    def _leave_alone(self, node: str, why: str) -> None:
        if node not in self._unfit:
            self._unfit[node] = why
            log.warning("The node '%s' of the Ray cluster sits out: %s.", self._name(node), why)

    def _name(self, node: str) -> str:
        return next((known.name for known in self.cluster.nodes() if known.id == node), node[:6] or "any")

    def dismiss(self, seat: Seat) -> None:
        """An actor is dead, or of no use any more."""
        import ray

        ray.kill(seat.handle)
        self.seats.remove(seat)
        self._deaths[seat.node.id] += 1
        if self._deaths[seat.node.id] > MOST_STARTS and len(self.seats) > 0:
            self._leave_alone(seat.node.id, f"{MOST_STARTS + 1} actors died there without having done anything")
        elif seat.node.id in {node.id for node in self.cluster.nodes()}:
            self.muster()

    def did_well(self, seat: Seat) -> None:
        self._deaths[seat.node.id] = 0

    def count(self, node: Node, **numbers: float) -> None:
        self.traffic.setdefault(node.name, Counter()).update(numbers)

    def close(self) -> None:
        import ray

        self._closed = True
        self._threads.shutdown(cancel_futures=True)  # each looks up soon, see `_get`
        for seat in self.seats:
            with suppress(Exception):
                ray.kill(seat.handle)
        self.seats = []

    # -- one of them -----------------------------------------------------------------------------------------
    def _start(self, node: str) -> None:
        self._starting[self._threads.submit(self._started, node)] = node

    def _started(self, place: str) -> Seat:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = next((known for known in self.cluster.nodes() if known.id == place), None)
        needs = {"num_gpus": self.config.ray_gpus, "num_cpus": 0} if self._on_gpu else {"num_cpus": self._cores(node)}
        where: Any = NodeAffinitySchedulingStrategy(place, soft=False) if place else "SPREAD"
        handle = ray.remote(Station).options(scheduling_strategy=where, max_restarts=0, **needs).remote()
        try:
            about = self._get(handle.hello.remote())
            node = next(known for known in self.cluster.nodes() if known.id == about["node"])
            if about["code"] != self._expected["code"]:
                other, own = about["fedkeel"], self._expected["fedkeel"]
                which = f"{other}, not {own}" if other != own else f"{own} with other code than here"
                raise Unfit(f"it has fedkeel {which}: install the same there", node.id)
            images = self._images_on(node, handle)
            inner = self._inner(node)
            told = self._get(handle.set_up.remote(self._work, self._own, images, inner))
        except ray.exceptions.RayTaskError as error:
            raise Unfit(f"it cannot run this ({_words(error)})", node.id if node else "") from error
        except BaseException:
            ray.kill(handle)
            raise
        for note in told.pop("notes", ()):
            tell(node, note)
        if told:
            ray.kill(handle)
            if "lost" in told:  # the images, with the actor that had read them: the next one reads them again
                self._images.pop(node.id, None)
            if "shortage" in told:
                raise Unfit(f"its memory does not suffice: {told['shortage']}", node.id)
            if "mistake" in told:
                raise FedkeelError(told["mistake"])
            raise RuntimeError(f"An actor on the node '{node.name}' could not begin:\n{told.get('error', told)}")
        wide = {"serial": 1, "processes": inner["workers"]}.get(inner["executor"], inner["workers"] or SLOTS)
        return Seat(node, handle, wide, idle_since=time.perf_counter())

    def _get(self, reference: Any) -> Any:
        """What an actor says, unless the run is over before that."""
        import ray

        while not self._closed:
            with suppress(ray.exceptions.GetTimeoutError):
                return ray.get(reference, timeout=TICK)
        raise Unfit("the run is over")

    def _inner(self, node: Node) -> dict[str, Any]:
        config = self.config
        if self._on_gpu:
            name = "serial" if config.dp == "local" else "cuda"
            return {"device": "cuda", "executor": name, "workers": config.workers}
        cores = self._cores(node)
        side_by_side = cores > 1 and config.threads <= 1 and config.workers != 1
        workers = config.workers or cores
        return {"device": "cpu", "executor": "processes" if side_by_side else "serial", "workers": workers}

    # -- images ----------------------------------------------------------------------------------------------
    def _images_on(self, node: Node, handle: Any) -> list[Any]:
        """Where an actor of this node finds them; an empty list says that it has read them itself."""
        with self._locks.setdefault(node.id, Lock()):
            if self.worker.federation.on_disk:
                return self._bring_images(node, handle)  # every process maps them by itself
            if node.id not in self._images:
                self._images[node.id] = self._bring_images(node, handle)
            return self._images[node.id]  # type: ignore[no-any-return]

    def _bring_images(self, node: Node, handle: Any) -> list[Any]:
        import ray

        federation, reason = self.worker.federation, "they have no name"
        on_disk, size = federation.on_disk, federation.images.nbytes
        named = self.config.data != PYTHON_OBJECT
        if named and (on_disk or node.id != self.cluster.here):
            self._content = self._content or content(federation)
            found = self._get(handle.read.remote(self.config.to_dict(), self._own, self._content))
            if "why" not in found:
                tell(node, "it reads the images itself, from the same path.", level=logging.INFO)
                return [] if found["images"] is None else [found["images"]]
            reason = found["why"]
        if on_disk:
            raise Unfit(f"the images are more than memory holds, and it cannot read them ({reason})", node.id)
        if size > 0.9 * node.store > 0:
            holds, has = node.store / 2**20, size / 2**20
            raise Unfit(f"its object store holds {holds:,.0f} MiB, and the images are {has:,.0f}", node.id)
        if node.id != self.cluster.here:
            tell(node, f"{size / 2**20:,.1f} MiB of images go there through the object store: {reason.rstrip('.')}.")
        with self._locks.setdefault("", Lock()):
            if self._put is None:
                self._put = ray.put(federation.images.cpu().numpy())
        self.count(node, bytes_down=size)
        return [self._put]


def tell(node: Node, note: str, level: int = logging.WARNING) -> None:
    log.log(level, "Node '%s': %s", node.name, note)


def _words(error: BaseException) -> str:
    """The last line of what Ray says, which is the cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__).rstrip(".")[:300]


def _pickled(work: Work) -> bytes:
    import ray

    class Pickler(ray.cloudpickle.CloudPickler):  # type: ignore[misc]
        def reducer_override(self, given: Any) -> Any:
            if isinstance(given, WeakKeyDictionary):  # what a method knows of models here, which are others there
                return WeakKeyDictionary, ()
            return super().reducer_override(given)

    file = io.BytesIO()
    Pickler(file).dump(work)
    return file.getvalue()


def _own_code(module: imports.OwnModule) -> OwnCode:
    return OwnCode(module, imports.texts(module))
