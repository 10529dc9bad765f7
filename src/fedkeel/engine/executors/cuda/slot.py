"""A slot: one resident model that clients stream through on a GPU, replaying CUDA graphs of a few local steps.

The client's batches are gathered and augmented on the GPU beforehand; a table that is also on the GPU says which
samples are next, so a replay needs nothing from the host.
"""

import time
from bisect import bisect_right
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fedkeel.core import state
from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.messages import Broadcast, Update
from fedkeel.core.state import Tensors
from fedkeel.engine import optimizers
from fedkeel.engine.batches import BatchPlan, middle
from fedkeel.engine.executors.cuda.lengths import FIRST, LENGTHS
from fedkeel.engine.executors.cuda.replay import Replays, capture
from fedkeel.engine.local import Worker
from fedkeel.errors import first_line
from fedkeel.nn.surgery import counting_together

BUFFER_BYTES = 64 * 2**20  # of gathered batches per slot
MOST_SIZES = 8  # of batches; those of more sizes than this run eagerly


class DrawsByItself(Exception):
    """A step draws from torch's default generator, which all slots share: its numbers would depend on the others."""


class Changed(Exception):
    """What a step refers to is not what it was when its graph was captured."""


@dataclass
class SlotClient:
    """One client on its way through a slot."""

    name: str
    plan: BatchPlan
    position: int = 0  # of the next batch in `plan.bounds`
    runs: list[list[int]] = field(default_factory=list)  # batches of one size that lie ready: the size, and how many

    @property
    def steps(self) -> int:
        return len(self.plan.bounds)


@dataclass
class Recorded:
    """The graphs of one variant of the step, and the client whose tensors they refer to."""

    client: LocalClient
    # By the size of a batch and the number of steps; of a size that was met once and has had one step, none yet.
    graphs: dict[int, dict[int, torch.cuda.CUDAGraph]] = field(default_factory=dict)


class Slot:
    """A resident model with its optimizer, buffers and graphs, on a stream of its own."""

    def __init__(self, worker: Worker, place: int = 0) -> None:
        """`place`: the first slots, which get the longest clients, go before the others where kernels queue up."""
        self.worker = worker
        least, greatest = torch.cuda.Stream.priority_range()  # type: ignore[call-arg]
        self.stream = torch.cuda.Stream(worker.device, priority=min(least, greatest + place))  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        worker.replays = Replays(self.pool, self.stream)
        self.rate = torch.zeros((), device=worker.device)
        self.optimizer: torch.optim.Optimizer | None = None  # not every slot trains
        self.recorded: dict[Hashable, Recorded] = {}
        self.loss = torch.zeros((), device=worker.device)
        # In the buffers, of the samples of the next steps.
        self._first = torch.arange(worker.config.batch_size * max(LENGTHS), device=worker.device)
        self._places = self._first.clone()
        # A method, or a compiler, that does the forward pass in its own way may look at the counters.
        own_way = worker.method.overrides("forward") or worker.config.compile
        norms = () if own_way else state.batch_norms(worker.model).values()
        self._norms = [
            norm for norm in norms if norm.num_batches_tracked is not None and type(norm).forward is _BatchNorm.forward
        ]
        self.images: Tensor | None = None
        self.labels: Tensor | None = None
        self.capacity = 0
        self.client: SlotClient | None = None  # the one under way
        self.local: LocalClient  # it, as the method sees it
        self._present: Recorded  # the graphs that fit it
        self.queued = 0  # steps launched, for balancing
        self.length = FIRST  # steps of a graph, at most
        self.captured = (0.0, 0)  # seconds that captures took, and their steps
        self.eager: str = ""  # why steps are not captured

    # -- one client ------------------------------------------------------------------------------------------
    def start(self, client: SlotClient, broadcast: Broadcast, memory: Tensors) -> None:
        worker = self.worker
        self.rate.fill_(worker.learning_rate_at(broadcast.round))
        if self.optimizer is None:
            self.optimizer = worker.optimizer(self.rate)
        else:
            optimizers.reset(self.optimizer)
        begun = worker.begin(client.name, broadcast, memory, self.optimizer)
        self.loss.zero_()
        self.client, self.local = client, self._adopt(begun)
        self._present = self.recorded[worker.method.step_variant(self.local)]

    def advance(self, graphs: int = 1) -> bool:
        """Launch so many graphs of the next few steps; True when the client has had its last."""
        client = self.client
        assert client is not None
        for _ in range(graphs):
            if not client.runs:
                self._fill(client)
            run = client.runs[0]
            steps = self._launch(self.local, *run)
            run[1] -= steps
            client.position += steps
            self.queued += steps
            if not run[1]:
                client.runs.pop(0)
                if client.position == client.steps:
                    return True
        return False

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
        last = bisect_right(bounds, start + self.capacity, lo=client.position, key=itemgetter(1))
        stop = bounds[last - 1][1]
        order = plan.order[start:stop].to(worker.store.images.device, non_blocking=True)
        batch = worker.store.batch(order, plan.uniforms[start:stop], worker.federation.train_transform)
        assert self.images is not None
        assert self.labels is not None
        self.images[: stop - start].copy_(batch.x)
        self.labels[: stop - start].copy_(batch.y)
        self._places.copy_(self._first)
        sizes = [after - before for before, after in bounds[client.position : last]]
        client.runs = [[size, len(list(alike))] for size, alike in groupby(sizes)]

    def _allocate(self) -> None:
        worker = self.worker
        transform = worker.federation.train_transform
        probe = transform(worker.store.images[:1].to(worker.device), middle(1, transform).to(worker.device))
        longest = worker.federation.most_samples * worker.config.local_epochs
        fitting = max(BUFFER_BYTES // (probe.numel() * probe.element_size()), worker.config.batch_size * FIRST)
        self.capacity = max(min(longest, fitting), worker.config.batch_size)
        self.images = torch.empty(self.capacity, *probe.shape[1:], device=worker.device, dtype=probe.dtype)
        self.labels = torch.empty(self.capacity, dtype=torch.int64, device=worker.device)

    # -- steps -----------------------------------------------------------------------------------------------
    def _launch(self, client: LocalClient, size: int, alike: int) -> int:
        """Launch a graph of some of the next steps, whose batches are of one size; how many it has.

        A rest is done by shorter graphs: those of a trial if there were any, else of two steps and of one.
        """
        known = self._present.graphs
        graphs = known.get(size)
        if graphs is None or self.eager:
            self._eager_step(client, size)  # the first one is real, and readies what a capture must not create
            if size == self.worker.config.batch_size or len(known) < MOST_SIZES:
                known.setdefault(size, {})
            return 1
        steps = self.length
        if steps > alike:
            steps = next(n for n in LENGTHS if n <= alike and (n in graphs or n <= FIRST))
        if steps not in graphs and not self._capture(graphs, client, size, steps):
            self._eager_step(client, size)
            return 1
        graphs[steps].replay()
        return steps

    def _eager_step(self, client: LocalClient, size: int) -> None:
        before = torch.cuda.get_rng_state(self.worker.device)  # seed and count of draws, which the host knows
        self._steps(client, size, 1)
        if not torch.equal(before, torch.cuda.get_rng_state(self.worker.device)):
            raise DrawsByItself

    def _steps(self, client: LocalClient, size: int, steps: int) -> None:
        """Local steps on the next samples; asks the host nothing, and has as few kernels as can be beside the steps."""
        assert self.images is not None
        assert self.labels is not None
        places = self._places[: size * steps]
        x, y = self.images.index_select(0, places), self.labels.index_select(0, places)
        for batch in map(Batch, torch.split(x, size), torch.split(y, size)):
            self.loss.add_(self.worker.step(client, batch), alpha=size)
        self._places += size * steps

    def _capture(self, graphs: dict[int, torch.cuda.CUDAGraph], client: LocalClient, size: int, steps: int) -> bool:
        def work() -> None:
            with counting_together(self._norms):
                self._steps(client, size, steps)

        began = time.perf_counter()
        try:
            graphs[steps] = capture(self.pool, work)
        except Exception as error:
            if isinstance(error, torch.OutOfMemoryError) or isinstance(error.__context__, torch.OutOfMemoryError):
                raise torch.OutOfMemoryError(str(error)) from error  # not a matter of the step: fewer slots will do
            if not isinstance(error, RuntimeError):
                if not self._norms:
                    raise
                self._norms = []  # perhaps the step looks at a counter, which is none then
                return self._capture(graphs, client, size, steps)
            self.eager = first_line(error)
            torch.cuda.synchronize(self.worker.device)
            return False
        seconds, captured = self.captured
        self.captured = seconds + time.perf_counter() - began, captured + steps
        return True

    def _adopt(self, client: LocalClient) -> LocalClient:
        """Put a new client's tensors where the captured graphs look for them."""
        variant = self.worker.method.step_variant(client)
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


def take_place(captured: LocalClient, client: LocalClient) -> None:
    """All but what the graphs refer to comes from the new client."""
    for name in ("name", "samples", "round", "rounds", "data", "learning_rate", "memory"):
        setattr(captured, name, getattr(client, name))


def same_tensors(old: Tensors, new: Tensors) -> None:
    if old is new:
        return
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
