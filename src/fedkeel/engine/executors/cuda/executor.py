"""Many clients at once on one GPU.

A small network on a small batch keeps a GPU busy for microseconds and then lets it wait for the next kernel launch.
So clients run side by side in slots (`cuda.slot`), each on a stream of its own: all slots replay their graphs side by
side, and clients stream through them, long ones first.
"""

import gc
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedkeel.core import state
from fedkeel.core.checking import glance
from fedkeel.core.evaluation import Evaluation
from fedkeel.core.messages import Answer, Broadcast, Missing, Update
from fedkeel.core.state import Tensors
from fedkeel.engine import optimizers
from fedkeel.engine.executors.cuda.lengths import GraphLength
from fedkeel.engine.executors.cuda.slot import DrawsByItself, Slot, SlotClient
from fedkeel.engine.executors.executor import EXECUTORS, Part
from fedkeel.engine.executors.serial import SerialExecutor
from fedkeel.engine.failures import ClientFailure, check_loss, look
from fedkeel.engine.local import Worker
from fedkeel.engine.memory import ClientMemory
from fedkeel.stopping import Stopped, stop_requested

log = logging.getLogger("fedkeel")
T = TypeVar("T")
Ended = list[tuple[str, Tensor, Update, Tensors]]  # client, its loss and what `glance` saw, update, memory
AHEAD = 4  # graphs launched for a client before the host turns to the next
MOST_SLOTS, FEWEST_SLOTS = 32, 4
TRIAL_STEPS = 12
# Seconds of steps, each taken alone, that are in flight together: what small kernels leave idle is small.
AT_ONCE = 20e-3
MEMORY_SHARE = 0.9  # of the free memory that slots may take


@EXECUTORS.register("cuda")
class CudaExecutor(SerialExecutor):
    """Many clients at once on one GPU: resident models that replay CUDA graphs side by side."""

    rank = 3
    captures_steps = True
    seconds_of = "Seconds of the host; the GPU works meanwhile, and launching captured steps is not among them."

    @classmethod
    def cannot_run(cls, device: torch.device) -> str:
        return "" if device.type == "cuda" else "needs a GPU: choose 'processes' or 'serial'."

    def __init__(self, worker: Worker, memory: ClientMemory, workers: int = 0) -> None:
        super().__init__(worker, memory)
        self._wanted = workers  # 0: what a trial says
        self._slots: list[Slot] = []
        self._static: list[Tensors] = []
        self._evaluation: Slot | None = None
        self._said = False
        self._length = GraphLength()
        uncapturable = worker.method.uncapturable
        self._one_by_one = f"'{uncapturable[0]}' does not declare its steps capturable" if uncapturable else ""
        self._one_by_one = self._one_by_one or optimizers.uncapturable(worker.config)

    def train(self, clients: Sequence[str], broadcast: Broadcast) -> Iterator[Update | Missing]:
        if not self._one_by_one:
            held = self._hold(broadcast)
            self.attendance.tell(clients)  # side by side: none has seconds of its own

            def attempt() -> dict[str, Update | Missing]:
                if not self._wanted and len(clients) > 1:
                    self._wanted = self._try(clients, held)
                return self._train(clients, held)

            try:
                results = self._in_memory(attempt)
            except DrawsByItself:
                self._one_by_one = "the model or the method draws from torch's default generator"
            else:
                self.attendance.tell(())
                yield from (results[client] for client in clients)
                return
            self._give_up_slots()  # the clients begin anew
        self._say(self._one_by_one)
        yield from super().train(clients, broadcast)

    def _try(self, clients: Sequence[str], broadcast: Broadcast) -> int:
        """How many slots: one is tried on the largest client, for the time of its step and the memory that it takes.

        The client starts anew afterwards; nothing of the trial stays but the slot and its graphs.
        """
        device = self.worker.device
        client = self._planned(self._longest_first(clients)[0], broadcast)
        if client.steps < TRIAL_STEPS:
            return MOST_SLOTS
        before = torch.cuda.memory_reserved(device)
        self._open(1)
        with torch.cuda.stream(self._slots[0].stream):
            slot = self._slots[0]
            slot.start(client, broadcast, self.memory.of(client.name))
            while client.position < TRIAL_STEPS - 4:  # so that what is timed is whole batches, and a replay
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
        """Out of memory: no longer graphs than there were, then half as many slots, until there is one; where that
        does not fit either, the run ends."""
        while True:
            try:
                return attempt()
            except torch.OutOfMemoryError:
                too_long = self._length.settle()
                if len(self._slots) <= 1 and not too_long:
                    raise
            # Only now: the exception held on to everything that its functions had in their hands.
            if not too_long:
                self._wanted = len(self._slots) // 2
                log.warning("The GPU's memory holds fewer clients at once than tried: going on with %d.", self._wanted)
            self._give_up_slots()

    def _give_up_slots(self) -> None:
        torch.cuda.synchronize(self.worker.device)
        self._slots = []
        gc.collect()
        torch.cuda.empty_cache()

    def _longest_first(self, clients: Sequence[str]) -> list[str]:
        return sorted(clients, key=lambda client: -self.worker.federation[client].samples)

    def _planned(self, client: str, broadcast: Broadcast) -> SlotClient:
        return SlotClient(client, self.worker.plan(client, broadcast.round))

    def _train(self, clients: Sequence[str], broadcast: Broadcast) -> dict[str, Update | Missing]:
        began = time.perf_counter()
        self._open(len(clients))
        waiting = deque(self._longest_first(clients))
        ended: Ended = []
        for slot in self._slots:
            slot.client, slot.queued, slot.captured, slot.length = None, 0, (0.0, 0), self._length.steps
        while waiting or any(slot.client for slot in self._slots):
            if stop_requested.is_set():
                torch.cuda.synchronize(self.worker.device)
                raise Stopped
            idle = [slot for slot in self._slots if slot.client is None]
            for slot in sorted(idle, key=lambda slot: slot.queued)[: len(waiting)]:
                client = self._planned(waiting.popleft(), broadcast)
                with torch.cuda.stream(slot.stream):
                    slot.start(client, broadcast, self.memory.of(client.name))
                self._advance(slot, ended)  # work for the GPU while the host readies the next client
            for slot in self._slots:
                self._advance(slot, ended)
        self._join()
        for slot in self._slots:
            if slot.eager:
                self._say(slot.eager)
        results = self._read(ended)
        self._length.see(self._slots, len(clients), time.perf_counter() - began, broadcast.rounds - broadcast.round - 1)
        return results

    @property
    def is_trying(self) -> bool:
        return not self._one_by_one and not self._length.is_settled

    def about(self) -> dict[str, Any]:
        return {"graph": f"{self._length.steps} steps"}

    def ask(self, clients: Sequence[str], broadcast: Broadcast, question: str) -> Iterator[Answer | Missing]:
        """Side by side, in the slots that training has opened."""

        def attempt() -> list[Answer | Missing]:
            self._open(1)
            answers: list[Answer | Missing] = []
            memories: dict[str, Tensors] = {}
            for i, client in enumerate(clients):
                slot = self._slots[i % len(self._slots)]
                with torch.cuda.stream(slot.stream):
                    try:
                        answer, memories[client] = slot.worker.answer(
                            client, broadcast, self.memory.of(client), question
                        )
                    except ClientFailure as failure:
                        answers.append(Missing(client, str(failure)))
                    else:
                        answers.append(answer)
            self._join()
            # Only now: what a client remembered may lie in another slot's memory, which that slot would use again, on
            # its own stream, while this one is still to read it.
            for client, memory in memories.items():
                self.memory.keep(client, memory)
            return answers

        yield from self._in_memory(attempt)

    def evaluate_parts(
        self, parts: Sequence[Part], broadcast: Broadcast, splits: Sequence[str], *, detailed: bool = False
    ) -> Iterator[list[Evaluation]]:
        """In a slot of its own, since only there can a pass be captured."""
        if self._evaluation is None:
            self._evaluation = Slot(self.worker)
        stream, plain = self._evaluation.stream, super().evaluate_parts

        def attempt() -> list[list[Evaluation]]:
            stream.wait_stream(torch.cuda.current_stream(self.worker.device))
            with torch.cuda.stream(stream):
                results = list(plain(parts, broadcast, splits, detailed=detailed))
            torch.cuda.current_stream(self.worker.device).wait_stream(stream)
            return results

        yield from self._in_memory(attempt)

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
            if slot.advance(AHEAD):
                update, memory, loss = slot.finish()
                seen = glance(update, memory)
                ended.append((client.name, torch.cat([loss.to(seen)[None], seen]), update, memory))

    def _read(self, ended: Ended) -> dict[str, Update | Missing]:
        """One look at all losses and numbers of `glance`; only now does the host wait for the GPU."""
        with self.worker.waiting():
            numbers = torch.stack([seen for _, seen, _, _ in ended]).tolist()
        results: dict[str, Update | Missing] = {}
        for (client, _, update, memory), (loss, *seen) in zip(ended, numbers, strict=True):
            update.metrics["loss"] = loss
            try:
                check_loss(loss)
                results[client] = look(update, memory, seen)
            except ClientFailure as failure:
                results[client] = Missing(client, str(failure))
            else:
                self.memory.keep(client, memory)
        return results

    def _hold(self, broadcast: Broadcast) -> Broadcast:
        """The broadcast at an address that stays the same from round to round, for the graphs."""
        given = broadcast.to(self.worker.device)
        groups = (given.weights, given.statistics, given.extras)
        if [*map(shapes, self._static)] == [*map(shapes, groups)]:
            for held, group in zip(self._static, groups, strict=True):
                state.load(held, group)
        else:
            self._static = [state.clone(group) for group in groups]
        return Broadcast(given.round, given.rounds, *self._static)

    def _say(self, reason: str) -> None:
        if not self._said:
            log.warning("Clients run one step at a time, not as captured graphs: %s.", reason)
            self._said = True


def shapes(tensors: Tensors) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
