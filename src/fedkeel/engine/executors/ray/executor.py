"""The executor `ray`: clients on every GPU, or on the cores, of a Ray cluster, on as many machines as it has.

Each actor runs clients by an executor of its own machine: `cuda` on a GPU, `processes` or `serial` on cores. The round
loop, the methods and the local step are those of one machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count, islice
from typing import Any

import torch

from fedkeel.config import Config
from fedkeel.core.evaluation import Evaluation, merged
from fedkeel.core.messages import Answer, Broadcast, Message, Missing, Summed, Update
from fedkeel.core.state import Tensors
from fedkeel.engine.evaluation import split_indices
from fedkeel.engine.executors.executor import EXECUTORS, Executor, Part
from fedkeel.engine.executors.processes import evaluations_from, parts_of
from fedkeel.engine.executors.ray import parcels
from fedkeel.engine.executors.ray.cluster import Cluster, lacks_ray
from fedkeel.engine.executors.ray.crew import Crew
from fedkeel.engine.executors.ray.memory import RemoteMemory
from fedkeel.engine.executors.ray.passes import Outcome, Pass
from fedkeel.engine.executors.ray.schedule import Speeds
from fedkeel.engine.executors.ray.station import Order
from fedkeel.engine.local import Worker
from fedkeel.engine.memory import ClientMemory
from fedkeel.errors import TrainingError

Read = Callable[[str, Outcome], Any]


@EXECUTORS.register("ray")
class RayExecutor(Executor):
    """Every GPU, or all cores, of a Ray cluster: an actor on each, which runs `cuda`, `processes` or `serial`."""

    seconds_of = "Seconds of the actors and their workers, added up over all of them."
    elsewhere = True
    memory_class = RemoteMemory
    memory: RemoteMemory

    @classmethod
    def cannot_run(cls, device: torch.device) -> str:  # noqa: ARG003
        return lacks_ray()

    @classmethod
    def suits(cls, config: Config) -> bool:  # noqa: ARG003
        return False  # it is chosen by name

    def __init__(self, worker: Worker, memory: ClientMemory, workers: int = 0) -> None:
        assert isinstance(memory, RemoteMemory)
        self.worker, self.memory, self.config = worker, memory, worker.config
        self._numbers = count()
        self._speeds = Speeds()
        self._pass: Pass | None = None
        self._added = 0  # weight of what is in the nodes' sums
        self._cluster = Cluster(self.config.ray_address)
        try:
            self._crew = Crew(worker, self._cluster)
            self._crew.wait()
        except BaseException:
            self.close()
            raise

    def train(self, clients: Sequence[str], broadcast: Broadcast) -> Iterator[Update | Missing]:
        uniform = self.config.weighting == "uniform"
        weights = {client: 1 if uniform else self.worker.federation[client].samples for client in clients}
        sums = tuple(self.sums) if self.config.partial_means else ()
        order = Order("train", next(self._numbers), broadcast.header, sums=sums, uniform=uniform)
        self._added = 0

        def read(client: str, outcome: Outcome) -> Update:
            header, groups = outcome
            if "sent" not in header["message"]:
                return Update.of(header["message"], groups)
            self._added += weights[client]
            return Summed.of(header["message"], groups)

        most = sum(weights.values())
        return self._in_order(order, [(client, None) for client in clients], broadcast, read, Missing, most)

    def mean(self) -> Tensors:
        if not self._added or self._pass is None:
            return {}
        return self._pass.mean(self._added)

    def ask(self, clients: Sequence[str], broadcast: Broadcast, question: str) -> Iterator[Answer | Missing]:
        order = Order("ask", next(self._numbers), broadcast.header, question=question)

        def read(_: str, outcome: Outcome) -> Message:
            return Answer.of(outcome[0]["message"], outcome[1])

        return self._in_order(order, [(client, None) for client in clients], broadcast, read, Missing)

    def evaluate(
        self, clients: Sequence[str], broadcast: Broadcast, splits: Sequence[str], *, detailed: bool = False
    ) -> Iterator[list[Evaluation]]:
        def lost(client: str, reason: str) -> list[Evaluation]:
            raise TrainingError(f"The evaluation of '{client}' failed, {reason}.")

        def read(_: str, outcome: Outcome) -> list[Evaluation]:
            return evaluations_from(outcome[0]["evaluations"], outcome[1])

        order = Order("evaluate", next(self._numbers), broadcast.header, splits=list(splits), detailed=detailed)
        parts = parts_of(self.worker, clients, splits)
        whole = [part for of_one in parts for part in of_one]
        results = self._in_order(order, whole, broadcast, read, lost)
        for of_one in parts:
            yield merged(evaluation for group in islice(results, len(of_one)) for evaluation in group)

    def about(self) -> dict[str, Any]:
        return {"nodes": {name: dict(numbers) for name, numbers in self._crew.traffic.items()}}

    def close(self) -> None:
        if crew := getattr(self, "_crew", None):
            crew.close()
        self._cluster.close()

    def _in_order(
        self,
        order: Order,
        parts: Sequence[Part],
        broadcast: Broadcast,
        read: Read,
        lost: Callable[[str, str], Any],
        most: int = 0,
    ) -> Iterator[Any]:
        """Do all of these wherever there is an actor, and yield what comes of them in their order."""
        import ray

        order = replace(order, most=most)
        self._crew.muster()
        parcel = parcels.packed(broadcast.groups)
        work = [float(self._samples(order, part)) for part in parts]
        going = self._pass = Pass(
            self._crew, self.memory, self._speeds, self.attendance, order,
            ray.put(parcel), parcels.nbytes(parcel), parts, work,
        )  # fmt: skip
        results: dict[int, Any] = {}
        turn = 0
        for place, (header, groups) in going.run():
            client = parts[place][0]
            if self.worker.clock is not None and "times" in header:
                self.worker.clock.add(header["times"])
            failed = header.get("failure")
            results[place] = lost(client, failed) if failed else read(client, (header, groups))
            while turn in results:
                yield results.pop(turn)
                turn += 1

    def _samples(self, order: Order, part: Part) -> int:
        client, of_it = part
        site = self.worker.federation[client]
        if order.do != "evaluate" or of_it is None:
            return site.samples
        return max(len(range(*of_it.indices(len(split_indices(site, split))))) for split in order.splits)
