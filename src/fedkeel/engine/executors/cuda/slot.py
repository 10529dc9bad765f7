"""A slot: one resident model that clients stream through on a GPU, replaying CUDA graphs of a few local steps.

The client's batches are gathered and augmented on the GPU beforehand; a counter that is also on the GPU says which
batch is next, so a replay needs nothing from the host.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.messages import Broadcast
from fedkeel.core.state import Tensors
from fedkeel.engine import optimizers
from fedkeel.engine.batches import Plan
from fedkeel.engine.executors.cuda.replay import Replays
from fedkeel.engine.local import Worker

STEPS = 2  # of one graph: of longer ones, those of large networks, the GPU runs fewer side by side
BUFFER_BYTES = 64 * 2**20  # of gathered batches per slot
MOST_SMALL_GRAPHS = 8  # remainder batches of more sizes than this run eagerly


class DrawsByItself(Exception):
    """A step draws from torch's default generator, which all slots share: its numbers would depend on the others."""


class Changed(Exception):
    """What a step refers to is not what it was when its graph was captured."""


@dataclass
class Job:
    """One client on its way through a slot."""

    name: str
    plan: Plan
    position: int = 0  # of the next batch in `plan.bounds`
    filled: int = 0  # up to which batch the slot's buffers are filled
    client: LocalClient | None = None
    loss: Tensor | None = None


@dataclass
class Recorded:
    """The graphs of one variant of the step, and the client whose tensors they refer to."""

    client: LocalClient
    graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = field(default_factory=dict)


class Slot:
    """A resident model with its optimiser, buffers and graphs, on a stream of its own."""

    def __init__(self, worker: Worker, place: int = 0) -> None:
        """`place`: the first slots, which get the longest clients, go before the others where kernels queue up."""
        self.worker = worker
        least, greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
        self.stream = torch.cuda.Stream(worker.device, priority=min(least, greatest + place))  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        worker.replays = Replays(self.pool, self.stream)
        self.rate = torch.zeros((), device=worker.device)
        self.optimizer = worker.resident_optimizer(self.rate)
        self.recorded: dict[Hashable, Recorded] = {}
        self.counter = torch.zeros((), dtype=torch.int64, device=worker.device)
        self.loss = torch.zeros((), device=worker.device)
        self.images: Tensor | None = None
        self.labels: Tensor | None = None
        self.capacity = 0
        self.queued = 0  # steps launched, for balancing
        self.eager: str = ""  # why steps are not captured

    # -- one client ------------------------------------------------------------------------------------------
    def start(self, job: Job, broadcast: Broadcast, memory: Tensors) -> None:
        worker = self.worker
        self.rate.fill_(worker.config.learning_rate_at(broadcast.round))
        optimizers.reset(self.optimizer)
        client = worker.begin(job.name, broadcast, memory, self.optimizer)
        self.loss.zero_()
        job.client = self._adopt(client)

    def finish(self, job: Job) -> tuple[LocalClient, Tensor]:
        assert job.client is not None
        return job.client, self.loss / len(job.plan.order)

    def advance(self, job: Job) -> bool:
        """Launch the next few steps; True when the client has had its last."""
        start, stop = job.plan.bounds[job.position]
        size = stop - start
        if job.position >= job.filled:
            self._fill(job)
        same = 1
        while (
            same < STEPS
            and job.position + same < job.filled
            and job.plan.bounds[job.position + same][1] - job.plan.bounds[job.position + same][0] == size
        ):
            same += 1
        steps = STEPS if same == STEPS else 1
        self._launch(job, size, steps)
        job.position += steps
        self.queued += steps
        return job.position == len(job.plan.bounds)

    # -- batches ---------------------------------------------------------------------------------------------
    def _fill(self, job: Job) -> None:
        """Gather and augment as many of the client's next batches as the buffers hold."""
        worker, bounds = self.worker, job.plan.bounds
        first = job.position
        start = bounds[first][0]
        if self.images is None:
            self._allocate()
        last = first
        while last < len(bounds) and bounds[last][1] - start <= self.capacity:
            last += 1
        stop = bounds[last - 1][1]
        order = job.plan.order[start:stop].to(worker.store.images.device, non_blocking=True)
        batch = worker.store.batch(order, job.plan.uniforms[start:stop], worker.federation.train_transform)
        assert self.images is not None
        assert self.labels is not None
        self.images[: stop - start].copy_(batch.x)
        self.labels[: stop - start].copy_(batch.y)
        self.counter.zero_()
        job.filled = last

    def _allocate(self) -> None:
        worker = self.worker
        transform = worker.federation.train_transform
        probe = transform(
            worker.store.images[:1].to(worker.device), torch.full((1, transform.draws), 0.5, device=worker.device)
        )
        longest = worker.federation.most_samples * worker.config.local_epochs
        fitting = max(BUFFER_BYTES // (probe.numel() * probe.element_size()), worker.config.batch_size * STEPS)
        self.capacity = max(min(longest, fitting), worker.config.batch_size)
        self.images = torch.empty(self.capacity, *probe.shape[1:], device=worker.device, dtype=probe.dtype)
        self.labels = torch.empty(self.capacity, dtype=torch.int64, device=worker.device)

    # -- steps -----------------------------------------------------------------------------------------------
    def _launch(self, job: Job, size: int, steps: int) -> None:
        client = job.client
        assert client is not None
        recorded = self.recorded.get(self.worker.method.step_variant(client))
        if self.eager or recorded is None or (size == 1 and steps > 1):
            for _ in range(steps):
                self._eager_step(client, size)
            return
        graph = recorded.graphs.get((size, steps))
        if graph is None:
            if len(recorded.graphs) >= MOST_SMALL_GRAPHS and size != self.worker.config.batch_size:
                self._eager_step(client, size)
                return
            self._eager_step(client, size)  # the first one is real, and readies what a capture must not create
            graph = self._capture(client, size, steps)
            if graph is not None:
                recorded.graphs[size, steps] = graph
            for _ in range(steps - 1):
                self._eager_step(client, size)
            return
        graph.replay()

    def _eager_step(self, client: LocalClient, size: int) -> None:
        before = torch.cuda.get_rng_state(self.worker.device)  # seed and count of draws, which the host knows
        self._step(client, size)
        if not torch.equal(before, torch.cuda.get_rng_state(self.worker.device)):
            raise DrawsByItself

    def _step(self, client: LocalClient, size: int) -> None:
        """One local step on the batch that the counter points at; asks the host nothing."""
        assert self.images is not None
        assert self.labels is not None
        places = self.counter + self._places(size)
        batch = Batch(self.images.index_select(0, places), self.labels.index_select(0, places))
        self.loss += self.worker.step(client, batch) * size
        self.counter += size

    def _places(self, size: int) -> Tensor:
        if not hasattr(self, "_arange"):
            self._arange = torch.arange(self.worker.config.batch_size, device=self.worker.device)
        return self._arange[:size]

    def _capture(self, client: LocalClient, size: int, steps: int) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            # Not torch.cuda.graph: it collects garbage and empties the cache each time, and there are many captures.
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                for _ in range(steps):
                    self._step(client, size)
            finally:
                graph.capture_end()
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or isinstance(error.__context__, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(str(error)) from error  # not a matter of the step: fewer slots will do
            self.eager = str(error).partition("\n")[0]
            torch.cuda.synchronize(self.worker.device)
            return None
        return graph

    def _adopt(self, client: LocalClient) -> LocalClient:
        """Put a new client's tensors where the captured graphs look for them."""
        variant = self.worker.method.step_variant(client)
        recorded = self.recorded.get(variant)
        if recorded is not None:
            captured = recorded.client
            try:
                views = captured.scratch["views"]
                for name, view in client.scratch["views"].items():
                    copy_into(views[name].scratch, view.scratch)
                    same_tensors(views[name].extras, view.extras)
                same_tensors(captured.broadcast.weights, client.broadcast.weights)
                same_tensors(captured.broadcast.statistics, client.broadcast.statistics)
            except Changed:
                recorded = None
            else:
                take_place(captured, client)
                for name, view in client.scratch["views"].items():
                    take_place(views[name], view)
                return captured
        self.recorded[variant] = Recorded(client)
        return client


def take_place(captured: LocalClient, client: LocalClient) -> None:
    """All but what the graphs refer to comes from the new client."""
    for name in ("name", "samples", "round", "rounds", "data", "learning_rate", "memory"):
        setattr(captured, name, getattr(client, name))


def same_tensors(old: Tensors, new: Tensors) -> None:
    if old.keys() != new.keys() or any(old[name].data_ptr() != new[name].data_ptr() for name in old):
        raise Changed


def copy_into(old: Any, new: Any) -> None:
    """Copy the tensors of `new` into those of `old`, which has the same structure, or raise `Changed`."""
    if old is new:
        return
    if type(old) is not type(new):
        raise Changed
    if isinstance(old, Tensor):
        if old.shape != new.shape or old.dtype != new.dtype or old.requires_grad != new.requires_grad:
            raise Changed
        if old.data_ptr() != new.data_ptr():
            with torch.no_grad():
                old.copy_(new)
    elif isinstance(old, dict):
        if old.keys() != new.keys():
            raise Changed
        for key in old:
            copy_into(old[key], new[key])
    elif isinstance(old, (list, tuple)):
        if len(old) != len(new):
            raise Changed
        for left, right in zip(old, new, strict=True):
            copy_into(left, right)
    elif hasattr(old, "__dict__") and not callable(old):
        copy_into(vars(old), vars(new))
    elif isinstance(old, torch.nn.Module) or callable(old) or old != new:
        raise Changed
