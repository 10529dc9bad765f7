"""What runs in an actor of Ray: clients, by an executor of this machine that does not know of any other.

Whatever goes wrong here is told as part of a reply, in words; only a process or a node that dies is Ray's to tell of.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import tempfile
import threading
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedkeel
from fedkeel.config import Config
from fedkeel.core import imports
from fedkeel.core.checking import check
from fedkeel.core.composition import Composition
from fedkeel.core.messages import Answer, BadMessage, Broadcast, Missing, Update
from fedkeel.core.state import Tensors, nbytes, to_device
from fedkeel.data.federation import Federation
from fedkeel.data.outline import image_digests, short
from fedkeel.engine.executors.executor import EXECUTORS, Executor
from fedkeel.engine.executors.processes import evaluations_to, keep_freed_memory
from fedkeel.engine.executors.ray.parcels import Parcel, fetched, packed, unpacked
from fedkeel.engine.local import Worker
from fedkeel.engine.memory import ClientMemory
from fedkeel.engine.optimizers import import_beforehand
from fedkeel.engine.setup import load_federation
from fedkeel.engine.stopwatch import Stopwatch
from fedkeel.errors import FedkeelError, shortage
from fedkeel.files import digest
from fedkeel.formulas.exact_sum import ExactSum
from fedkeel.trust.rules import PlainGradients

Task = tuple[int, str, slice | None]  # its place among all, the client, and of an evaluation which part
EMPTY: Parcel = ([], [])


@dataclass(frozen=True)
class OwnCode:
    """A module of the user's that registers what a run names, and the texts of it and of what it imports."""

    module: imports.OwnModule
    texts: Mapping[str, bytes]  # by module

    def bring(self) -> None:
        """Import it from where it was, if all of it is the same text there; else from copies."""
        if not self.module.missing():
            return
        files = [(self.module.name, self.module.file, self.module.digest), *self.module.beside]
        if all(Path(file).is_file() and digest(Path(file).read_bytes()) == known for _, file, known in files):
            imports.bring(self.module)
            return
        folder = Path(tempfile.mkdtemp(prefix="fedkeel-code-"))
        copies = []
        for name, file, _ in files:
            inside = f"{name.replace('.', '/')}{'/__init__' * (Path(file).name == '__init__.py')}.py"
            copies.append(folder / inside)
            copies[-1].parent.mkdir(parents=True, exist_ok=True)
            copies[-1].write_bytes(self.texts[name])
        imports.bring(replace(self.module, file=str(copies[0])))


@dataclass(frozen=True)
class Work:
    """All of a run that its clients need, but the images."""

    config: Config
    method: Composition
    model: nn.Module
    federation: Mapping[str, Any]  # its fields, without the images
    gradients: PlainGradients
    watching: Any
    profiled: bool


@dataclass(frozen=True)
class Order:
    """What clients are to do, with which broadcast."""

    do: str  # "train", "ask" or "evaluate"
    number: int  # of the broadcast, counted over the run
    header: Mapping[str, Any]  # of it
    question: str = ""
    splits: Sequence[str] = ()
    detailed: bool = False
    sums: Sequence[str] = ()  # groups of an update that are added up here and not sent
    most: int = 0  # the weight of all clients of the round
    uniform: bool = False  # every client has the weight 1


def version() -> dict[str, str]:
    return {"fedkeel": fedkeel.__version__, "code": _code(), "torch": torch.__version__.partition("+")[0]}


def _code() -> str:
    """A digest of the package's text: two checkouts of one version may still differ."""
    folder = Path(fedkeel.__file__).parent
    return digest(b"".join(digest(path.read_bytes()).encode() for path in sorted(folder.rglob("*.py"))))[:16]


def content(federation: Federation) -> str:
    """A digest of images and labels."""
    return short(image_digests(federation.images)) + short(federation.labels.cpu().numpy())


class Station:
    """An actor: it has a worker, an executor of this machine, and what its clients of this round add up to."""

    def __init__(self) -> None:
        self._notes: list[str] = []
        own_process(self._notes)
        self._executor: Executor | None = None
        self._broadcast: tuple[int, Broadcast] = (-1, Broadcast(0, 0, {}, {}))
        self._sum: ExactSum | None = None
        self._images: Tensor | None = None

    # -- getting ready ---------------------------------------------------------------------------------------
    def hello(self) -> dict[str, Any]:
        import ray

        here = {"node": ray.get_runtime_context().get_node_id(), "host": platform.node(), "pid": os.getpid()}
        return version() | here

    def read(self, config: Mapping[str, Any], own: Sequence[OwnCode], expected: str) -> Any:
        """The images that the configuration names, if they are those of the run: put where all actors of this node
        find them. Else why not."""
        import ray

        try:
            for code in own:
                code.bring()
            found = load_federation(Config(**config))
        except Exception as error:
            return {"why": str(error).strip().partition("\n")[0] or type(error).__name__}
        if content(found) != expected:
            return {"why": "what is there are other images"}
        return {"images": None if found.on_disk else ray.put(found.images.numpy())} | self._keep(found)

    def _keep(self, found: Federation) -> dict[str, Any]:
        if found.on_disk:  # mapped from a file, as they are in every process that reads it
            self._images = found.images
        return {}

    def set_up(self, work: bytes, own: Sequence[OwnCode], images: Sequence[Any], inner: Mapping[str, Any]) -> Any:
        """Make the worker and the executor; what is wrong with them, as a sentence."""
        import ray

        with _told() as problem:
            for code in own:
                code.bring()
            given: Work = ray.cloudpickle.loads(work)
            pixels = _tensor(fetched(images[0])) if images else self._images
            assert pixels is not None
            federation = Federation(images=pixels, **given.federation)
            device = torch.device(inner["device"])
            threads = given.config.threads or 1
            torch.set_num_threads(threads)
            keep_freed_memory()
            import_beforehand(given.config)
            config = given.config.replace(threads=threads, executor=inner["executor"], device=inner["device"])
            clock = Stopwatch() if given.profiled else None
            model: Any = given.model
            worker = Worker(
                *(config, federation, given.method, model, device),
                watching=given.watching, gradient_rule=given.gradients, clock=clock,
            )  # fmt: skip
            self._executor = EXECUTORS.build(
                inner["executor"], worker, ClientMemory(config.stateless, device=device), workers=inner["workers"]
            )
        return problem | {"notes": self._take_notes()}

    # -- the work of a round ---------------------------------------------------------------------------------
    def work(
        self, order: Order, broadcast: Sequence[Any], tasks: Sequence[Task], memories: Sequence[Any]
    ) -> Iterator[Any]:
        """Do these; of each a reply, and what the client remembers as a thing of its own, which may stay here."""
        executor = self._executor
        assert executor is not None
        names = [client for _, client, _ in tasks]
        with _told() as problem:
            if self._broadcast[0] != order.number:
                groups = unpacked(fetched(broadcast[0]))
                self._broadcast, self._sum = (order.number, Broadcast.of(order.header, groups)), None
            for client, memory in zip(names, memories, strict=True):
                executor.memory.keep(client, {} if memory is None else unpacked(fetched(memory)).get("memory", {}))
        if problem:
            yield problem | {"place": tasks[0][0]}, EMPTY
            return
        results = self._results(executor, order, tasks)
        for place, client, _ in tasks:
            with _told() as problem:
                header, groups = self._reply(executor, order, client, next(results))
            if problem:
                yield problem | {"place": place, "notes": self._take_notes()}, EMPTY
                return
            memory = executor.memory.look(client) if order.do != "evaluate" else {}
            remembers = nbytes(memory)
            if order.do != "evaluate":  # where parts of a client may follow
                executor.memory.keep(client, {})
            times = {} if executor.worker.clock is None else {"times": executor.worker.clock.take()}  # type: ignore[attr-defined]
            yield (
                header | times | {"place": place, "remembers": remembers, "notes": self._take_notes()},
                packed(groups),
            )
            if remembers:
                yield packed({"memory": memory})
                yield None  # nobody looks at the memory itself: this says that it was made
        for client in names:
            executor.memory.keep(client, {})

    def _results(self, executor: Executor, order: Order, tasks: Sequence[Task]) -> Iterator[Any]:
        broadcast, names = self._broadcast[1], [client for _, client, _ in tasks]
        if order.do == "train":
            return executor.train(names, broadcast)
        if order.do == "ask":
            return executor.ask(names, broadcast, order.question)
        parts = [(client, part) for _, client, part in tasks]
        return executor.evaluate_parts(parts, broadcast, order.splits, detailed=order.detailed)

    def _reply(
        self, executor: Executor, order: Order, client: str, result: Any
    ) -> tuple[dict[str, Any], dict[str, Tensors]]:
        if isinstance(result, Missing):
            return {"failure": result.reason}, {}
        if isinstance(result, Update):
            try:
                is_added = self._add(order, result)
            except BadMessage as bad:
                return {"failure": str(bad)}, {}
            if is_added:
                groups = {name: group for name, group in result.groups.items() if name not in order.sums}
                return {"message": result.header | {"sent": result.nbytes}}, groups
            return {"message": result.header}, result.groups
        if isinstance(result, Answer):
            return {"message": result.header}, result.groups
        tables, outputs = evaluations_to(result)
        return {"evaluations": tables}, outputs

    def _add(self, order: Order, update: Update) -> bool:
        """Count an update into the sum, if that is wanted and can be."""
        broadcast = self._broadcast[1]
        own = _together(update, order.sums)
        if not own:
            return False
        check(update, broadcast)
        if self._sum is None:
            self._sum = ExactSum(to_device(_together(broadcast, order.sums), _device(own)), order.most)
        return self._sum.add(own, 1 if order.uniform else update.samples)

    def take_sum(self, number: int) -> Any:
        """What the clients of this round that ran here add up to, and how much they weigh."""
        if self._broadcast[0] != number or self._sum is None:
            return 0, EMPTY
        return self._sum.weight, packed({"sums": self._sum.sums})

    def combine(self, order: Order, broadcast: Sequence[Any], sums: Sequence[Any], *, finish: bool) -> Any:
        """Add up the sums of several actors; in the end, their mean."""
        import ray

        groups = unpacked(ray.get(broadcast[0]))
        total = ExactSum(_together(Broadcast.of(order.header, groups), order.sums), order.most)
        for weight, parcel in ray.get(list(sums)):
            total.merge(unpacked(parcel).get("sums", {}), weight)
        return total.weight, packed({"mean": total.mean()} if finish else {"sums": total.sums})

    def close(self) -> None:
        if self._executor is not None:
            self._executor.close()

    def _take_notes(self) -> list[str]:
        notes = self._notes[:]
        self._notes.clear()
        return notes


def _together(message: Broadcast | Update, groups: Iterable[str]) -> Tensors:
    return {name: tensor for group in groups for name, tensor in message.groups[group].items()}


def _device(tensors: Tensors) -> torch.device:
    return next(iter(tensors.values())).device


def _tensor(array: Any) -> Tensor:
    """The images, where they lie: nobody writes into them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nobody should
        return torch.from_numpy(array)


class _told:  # noqa: N801
    """Around work of others: what goes wrong inside is in the table, as a reply."""

    def __enter__(self) -> dict[str, Any]:
        self._problem: dict[str, Any] = {}
        return self._problem

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        import ray

        if isinstance(error, ray.exceptions.LocalRayletDiedError):
            return False  # and this process in a moment: what it had to do is done elsewhere
        if isinstance(error, ray.exceptions.ObjectLostError | ray.exceptions.GetTimeoutError):
            self._problem["lost"] = type(error).__name__
            return True
        if isinstance(error, FedkeelError):
            self._problem["mistake"] = str(error)
        elif lack := shortage(error):
            self._problem["shortage"] = lack
        else:
            self._problem["error"] = "".join(traceback.format_exception(error))
        return True


def own_process(notes: list[str]) -> None:
    """Make the process that of an actor: Ctrl-C is the driver's to handle, and notes go along with replies."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = logging.getLogger("fedkeel")
    log.handlers, log.propagate = [_Notes(notes)], False


class _Notes(logging.Handler):
    def __init__(self, notes: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self._notes.append(self.format(record))
