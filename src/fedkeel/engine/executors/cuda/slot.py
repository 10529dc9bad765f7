"""A slot: one resident model that clients stream through on a GPU, replaying CUDA graphs of a few local steps.

The client's batches are gathered and augmented on the GPU beforehand; a counter that is also on the GPU says which
batch is next, so a replay needs nothing from the host.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.messages import Broadcast, Update
from fedkeel.core.state import Tensors
from fedkeel.engine.batches import BatchPlan, middle
from fedkeel.engine.local import Worker
from fedkeel.engine.optimizers import Fused, FusedSGD
from fedkeel.engine.schedules import learning_rate_at
from fedkeel.engine.tasks import Task, fetched
from fedkeel.errors import first_line

STEPS = 2  # of one graph: of longer ones, those of large networks, the GPU runs fewer side by side
BUFFER_BYTES = 64 * 2**20  # of gathered batches per slot
MOST_SMALL_GRAPHS = 8  # remainder batches of more sizes than this run eagerly


class DrawsByItself(Exception):
    """A step draws from torch's default generator, which all slots share: its numbers would depend on the others."""


class Changed(Exception):
    """What a step refers to is not what it was when its graph was captured."""


@dataclass
class SlotClient:
    """One client on its way through a slot."""

    task: Task
    plan: BatchPlan
    position: int = 0  # of the next batch in `plan.bounds`
    filled: int = 0  # up to which batch the slot's buffers are filled

    @property
    def steps(self) -> int:
        return len(self.plan.bounds)


@dataclass
class Recorded:
    """The graphs of one variant of the step, and the client whose tensors they refer to."""

    client: LocalClient
    graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = field(default_factory=dict)


class Slot:
    """A resident model with its optimizer, buffers and graphs, on a stream of its own."""

    def __init__(self, worker: Worker, place: int = 0) -> None:
        """`place`: the first slots, which get the longest clients, go before the others where kernels queue up."""
        self.worker = worker
        least, greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
        self.stream = torch.cuda.Stream(worker.device, priority=min(least, greatest + place))  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.rate = torch.zeros((), device=worker.device)
        self.optimizer: FusedSGD | Fused | None = None  # not every slot trains
        self.recorded: dict[Hashable, Recorded] = {}
        self.counter = torch.zeros((), dtype=torch.int64, device=worker.device)
        self.loss = torch.zeros((), device=worker.device)
        self._places = torch.arange(worker.config.batch_size, device=worker.device)
        self.images: Tensor | None = None
        self.labels: Tensor | None = None
        self.capacity = 0
        self.client: SlotClient | None = None  # the one under way
        self.local: LocalClient  # it, as the method sees it
        self.queued = 0  # steps launched, for balancing
        self.eager: str = ""  # why steps are not captured

    # -- one client ------------------------------------------------------------------------------------------
    def start(self, client: SlotClient, broadcast: Broadcast) -> None:
        worker, memory = self.worker, fetched(client.task.memory)
        self.rate.fill_(learning_rate_at(worker.config, broadcast.round))
        if self.optimizer is None:
            made = worker.optimizer(self.rate)
            assert isinstance(made, (FusedSGD, Fused))  # others are not captured
            self.optimizer = made
        else:
            self.optimizer.reset()
        begun = worker.begin(client.task.client, broadcast, memory, self.optimizer)
        self.loss.zero_()
        self.client, self.local = client, self._adopt(begun)

    def advance(self) -> bool:
        """Launch the next few steps; True when the client has had its last."""
        client = self.client
        assert client is not None
        if client.position >= client.filled:
            self._fill(client)
        last = min(client.position + STEPS, client.filled)
        sizes = [stop - start for start, stop in client.plan.bounds[client.position : last]]
        steps = STEPS if sizes == sizes[:1] * STEPS else 1
        self._launch(self.local, sizes[0], steps)
        client.position += steps
        self.queued += steps
        return client.position == client.steps

    def finish(self) -> tuple[Update, Tensors, Tensor]:
        """The client's update, what it remembers, and its mean loss, which is still on the GPU; the slot is free."""
        assert self.client is not None
        loss, self.client = self.loss / len(self.client.plan.order), None
        return *self.worker.leave(self.local, 0.0), loss

    # -- batches ---------------------------------------------------------------------------------------------
    def _fill(self, client: SlotClient) -> None:
        """Gather and augment as many of the client's next batches as the buffers hold."""
        worker, plan, bounds = self.worker, client.plan, client.plan.bounds
        start = bounds[client.position][0]
        if self.images is None:
            self._allocate()
        last = client.position
        while last < len(bounds) and bounds[last][1] - start <= self.capacity:
            last += 1
        stop = bounds[last - 1][1]
        order = plan.order[start:stop].to(worker.store.images.device, non_blocking=True)
        batch = worker.store.batch(order, plan.uniforms[start:stop], worker.federation.train_transform)
        assert self.images is not None
        assert self.labels is not None
        self.images[: stop - start].copy_(batch.x)
        self.labels[: stop - start].copy_(batch.y)
        self.counter.zero_()
        client.filled = last

    def _allocate(self) -> None:
        worker = self.worker
        transform = worker.federation.train_transform
        probe = transform(worker.store.images[:1].to(worker.device), middle(1, transform).to(worker.device))
        config = worker.config
        longest = config.local_steps * config.batch_size or worker.federation.most_samples * config.local_epochs
        fitting = max(BUFFER_BYTES // (probe.numel() * probe.element_size()), worker.config.batch_size * STEPS)
        self.capacity = max(min(longest, fitting), worker.config.batch_size)
        self.images = torch.empty(self.capacity, *probe.shape[1:], device=worker.device, dtype=probe.dtype)
        self.labels = torch.empty(self.capacity, dtype=torch.int64, device=worker.device)

    # -- steps -----------------------------------------------------------------------------------------------
    def _launch(self, client: LocalClient, size: int, steps: int) -> None:
        recorded = None if self.eager else self.recorded.get(variant_of(client))
        graph = recorded.graphs.get((size, steps)) if recorded else None
        if graph is not None:
            graph.replay()
            return
        self._eager_step(client, size)  # the first one is real, and readies what a capture must not create
        usual = size == self.worker.config.batch_size
        if recorded and (size > 1 or steps == 1) and (usual or len(recorded.graphs) < MOST_SMALL_GRAPHS):
            self._capture(recorded, client, size, steps)
        for _ in range(steps - 1):
            self._eager_step(client, size)

    def _eager_step(self, client: LocalClient, size: int) -> None:
        before = torch.cuda.get_rng_state(self.worker.device)  # seed and count of draws, which the host knows
        self._step(client, size)
        if not torch.equal(before, torch.cuda.get_rng_state(self.worker.device)):
            raise DrawsByItself

    def _step(self, client: LocalClient, size: int) -> None:
        """One local step on the batch that the counter points at; asks the host nothing."""
        assert self.images is not None
        assert self.labels is not None
        places = self.counter + self._places[:size]
        batch = Batch(self.images.index_select(0, places), self.labels.index_select(0, places))
        self.loss += self.worker.step(client, batch) * size
        self.counter += size

    def _capture(self, recorded: Recorded, client: LocalClient, size: int, steps: int) -> None:
        def work() -> None:
            for _ in range(steps):
                self._step(client, size)

        try:
            recorded.graphs[size, steps] = capture(self.pool, work)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or isinstance(error.__context__, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(str(error)) from error  # not a matter of the step: fewer slots will do
            self.eager = first_line(error)
            torch.cuda.synchronize(self.worker.device)

    def _adopt(self, client: LocalClient) -> LocalClient:
        """Put a new client's tensors where the captured graphs look for them."""
        variant = variant_of(client)
        recorded = self.recorded.get(variant)
        if recorded is not None:
            captured = recorded.client
            try:
                for name, view in client.views.items():
                    copy_into(captured.views[name].scratch, view.scratch)
                    same_tensors(captured.views[name].extras, view.extras)
                same_tensors(captured.broadcast.weights, client.broadcast.weights)
                same_tensors(captured.broadcast.statistics, client.broadcast.statistics)
            except Changed:
                recorded = None
            else:
                take_place(captured, client)
                for name, view in client.views.items():
                    take_place(captured.views[name], view)
                return captured
        self.recorded[variant] = Recorded(client)
        return client


def capture(pool: Any, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Not by `torch.cuda.graph`: it collects garbage and empties the cache each time, and there are many captures."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        work()
    finally:
        graph.capture_end()
    return graph


def variant_of(client: LocalClient) -> Hashable:
    """What a step depends on beside tensors: the plain values in the scratch of each part."""
    plain = (bool, int, float, str, type(None))
    return tuple(
        (part, name, value if isinstance(value, plain) else type(value).__name__)
        for part, view in client.views.items()
        for name, value in sorted(view.scratch.items(), key=lambda item: item[0])
    )


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
