"""Many clients at once on one GPU.

A small network on a small batch keeps a GPU busy for microseconds and then lets it wait for the next kernel launch.
So clients run side by side in slots (`cuda.slot`), each on a stream of its own: all slots replay their graphs side by
side, and clients stream through them, long ones first.
"""

import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedkeel.config import Config
from fedkeel.core import state
from fedkeel.core.checking import size
from fedkeel.core.messages import Broadcast, Missing, Update
from fedkeel.core.state import Tensors
from fedkeel.engine import optimizers
from fedkeel.engine.executors.cuda.slot import Changed, DrawsByItself, Slot, SlotClient, copy_into
from fedkeel.engine.executors.executor import EXECUTORS
from fedkeel.engine.executors.serial import SerialExecutor
from fedkeel.engine.local import ClientFailure, Worker, refuse_not_finite
from fedkeel.engine.tasks import Result, Task
from fedkeel.stopping import Stopped, stop_requested

log = logging.getLogger("fedkeel")
T = TypeVar("T")
Ended = list[tuple[Tensor, Update, Tensors]]  # the loss and the size of the tensors of a client, its update, its memory
AHEAD = 3  # graphs launched for a client before the host turns to the next
MOST_SLOTS, FEWEST_SLOTS = 32, 4
TRIAL_STEPS = 10
# Seconds of steps, each taken alone, that are in flight together: what small kernels leave idle is small.
AT_ONCE = 20e-3
MEMORY_SHARE = 0.9  # of the free memory that slots may take


@EXECUTORS.register("cuda")
class CudaExecutor(SerialExecutor):
    """Many clients at once on one GPU: resident models that replay CUDA graphs side by side."""

    @classmethod
    def rank(cls, config: Config) -> int:  # noqa: ARG003
        return 3

    @classmethod
    def cannot_run(cls, config: Config, device: torch.device) -> str:
        if config.dp == "local":
            return "replays steps as they were captured, and 'dp=local' has other noise in each: choose 'serial'."
        return "" if device.type == "cuda" else "needs a GPU: choose 'processes' or 'serial'."

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker)
        self._wanted = worker.config.workers  # 0: what a trial says
        self._slots: list[Slot] = []
        self._static: tuple[Tensors, Tensors, Tensors] | None = None
        self._said = False
        uncapturable = worker.method.uncapturable
        self._one_by_one = f"'{uncapturable[0]}' does not declare its steps capturable" if uncapturable else ""
        self._one_by_one = self._one_by_one or optimizers.uncapturable(worker.config)

    def map(self, tasks: Sequence[Task], broadcast: Broadcast) -> Iterator[Result[Any] | Missing]:
        if not tasks or tasks[0].do != "train":
            return iter(self._in_memory(lambda: [self.worker.do(task, broadcast) for task in tasks]))
        if not self._one_by_one:
            held = self._hold(broadcast)
            try:
                return iter(self._in_memory(lambda: self._train(tasks, held)))
            except DrawsByItself:
                self._one_by_one = "the model or the method draws from torch's default generator"
            self._give_up_slots()  # the clients begin anew
        self._say(self._one_by_one)
        return super().map(tasks, broadcast)

    def _try(self, tasks: Sequence[Task], broadcast: Broadcast) -> int:
        """How many slots: one is tried on the largest client, for the time of its step and the memory that it takes.

        The client starts anew afterwards; nothing of the trial stays but the slot and its graphs.
        """
        device = self.worker.device
        client = self._longest_first(tasks, broadcast)[0]
        if client.steps < TRIAL_STEPS:
            return MOST_SLOTS
        before = torch.cuda.memory_reserved(device)
        self._open(1)
        with torch.cuda.stream(self._slots[0].stream):
            slot = self._slots[0]
            slot.start(client, broadcast)
            while client.position < TRIAL_STEPS - 2:
                slot.advance()
            torch.cuda.synchronize(device)
            began, position = time.perf_counter(), client.position
            slot.advance()
            torch.cuda.synchronize(device)
        seconds = (time.perf_counter() - began) / (client.position - position)
        taken = max(torch.cuda.memory_reserved(device) - before, 1)
        fitting = 1 + int(MEMORY_SHARE * torch.cuda.mem_get_info(device)[0] / taken)
        useful = max(FEWEST_SLOTS, min(MOST_SLOTS, round(AT_ONCE / seconds)))
        log.info(
            "%d clients at once: a step alone takes %.2f ms, a client %.1f GiB.",
            min(fitting, useful), 1000 * seconds, taken / 2**30,
        )  # fmt: skip
        return min(fitting, useful)

    def _in_memory(self, attempt: Callable[[], T]) -> T:
        """Out of memory: half as many slots, until there is one; where that does not fit either, the run ends."""
        while True:
            try:
                return attempt()
            except torch.OutOfMemoryError:
                if len(self._slots) <= 1:
                    raise
            # Only now: the exception held on to everything that its functions had in their hands.
            self._wanted = len(self._slots) // 2
            log.warning("The GPU's memory holds fewer clients at once than tried: going on with %d.", self._wanted)
            self._give_up_slots()

    def _give_up_slots(self) -> None:
        torch.cuda.synchronize(self.worker.device)
        self._slots = []
        gc.collect()
        torch.cuda.empty_cache()

    def _longest_first(self, tasks: Sequence[Task], broadcast: Broadcast) -> list[SlotClient]:
        planned = [SlotClient(task, self.worker.plan(task.client, broadcast.round)) for task in tasks]
        return sorted(planned, key=lambda client: -client.steps)

    def _train(self, tasks: Sequence[Task], broadcast: Broadcast) -> list[Result[Any] | Missing]:
        if not self._wanted and len(tasks) > 1:
            self._wanted = self._try(tasks, broadcast)
        self._open(len(tasks))
        waiting = self._longest_first(tasks, broadcast)
        ended: Ended = []
        for slot in self._slots:
            slot.client, slot.queued = None, 0
        while waiting or any(slot.client for slot in self._slots):
            if stop_requested.is_set():
                torch.cuda.synchronize(self.worker.device)
                raise Stopped
            idle = [slot for slot in self._slots if slot.client is None]
            for slot in sorted(idle, key=lambda slot: slot.queued)[: len(waiting)]:
                client = waiting.pop(0)
                with torch.cuda.stream(slot.stream):
                    slot.start(client, broadcast)
                # Work for the GPU while the host readies the next client.
                for _ in range(AHEAD):
                    self._advance(slot, ended)
            for slot in self._slots:
                self._advance(slot, ended)
        self._join()
        for slot in self._slots:
            if slot.eager:
                self._say(slot.eager)
        return self._read(ended)

    def _open(self, clients: int) -> None:
        """As many slots as there is work for, ready for what lies on the GPU now."""
        while len(self._slots) < min(self._wanted or 1, clients):
            self._slots.append(Slot(self.worker.twin(), place=len(self._slots)))
        ready = torch.cuda.current_stream(self.worker.device).record_event()
        for slot in self._slots:
            slot.stream.wait_event(ready)

    def _join(self) -> None:
        for slot in self._slots:
            torch.cuda.current_stream(self.worker.device).wait_stream(slot.stream)

    def _advance(self, slot: Slot, ended: Ended) -> None:
        """Launch the next steps of the client in this slot, if any; after its last ones, take its update."""
        client = slot.client
        if client is None:
            return
        with torch.cuda.stream(slot.stream):
            if slot.advance():
                update, memory, loss = slot.finish()
                sound = size({**update.weights, **update.statistics, **memory}).to(loss)
                ended.append((torch.stack([loss, sound]), update, memory))

    def _read(self, ended: Ended) -> list[Result[Any] | Missing]:
        """One look at all losses and norms; only now does the host wait for the GPU."""
        numbers = torch.stack([pair for pair, _, _ in ended]).tolist()
        results: list[Result[Any] | Missing] = []
        for (_, update, memory), (loss, sound) in zip(ended, numbers, strict=True):
            try:
                refuse_not_finite(loss)
                if not math.isfinite(sound):
                    refuse_not_finite(loss, update.weights, update.statistics, memory)
            except ClientFailure as failure:
                results.append(Missing(update.client, str(failure)))
            else:
                update.metrics["loss"] = loss
                results.append(Result(update.client, update, memory))
        return results

    def _hold(self, broadcast: Broadcast) -> Broadcast:
        """The broadcast at an address that stays the same from round to round, for the graphs."""
        given = broadcast.to(self.worker.device)
        tensors = (given.weights, given.statistics, given.extras)
        try:
            if self._static is None:
                raise Changed
            copy_into(self._static, tensors)
        except Changed:
            self._static = state.clone(tensors[0]), state.clone(tensors[1]), state.clone(tensors[2])
        return Broadcast(given.round, given.rounds, *self._static)

    def _say(self, reason: str) -> None:
        if not self._said:
            log.warning("Clients run one step at a time, not as captured graphs: %s.", reason)
            self._said = True
