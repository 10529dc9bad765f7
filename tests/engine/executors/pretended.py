"""A pretended card: what the executor `cuda` asks of `torch.cuda`, on tensors of the CPU, where there is no GPU.

Streams do nothing. Graphs are those of CUDA in what matters to a step: between the beginning and the end of a capture
operations are noted with the very tensors that they read and write, and not done; a replay does them on these tensors,
and nothing of what Python did around them. What asks the host for a number, or draws one, ends a capture with an error.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fedkeel.engine.executors.cuda.executor import CudaExecutor
from fedkeel.engine.local import Worker
from fedkeel.engine.optimizers import uncapturable
from tests.methods.together import QUESTIONS

Operation = tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]  # what, of which tensors, and what came of it


def asks_the_host(function: Any, tensors: list[Tensor]) -> bool:
    name = function.name().partition("::")[2].partition(".")[0]
    by_truth = name in ("index", "index_put_") and any(t.dtype == torch.bool for t in tensors[1:])
    return name in QUESTIONS or by_truth or torch.Tag.nondeterministic_seeded in function.tags


class Recorder(TorchDispatchMode):
    """Notes what is to be done, and does none of it: results have their shapes and no numbers yet."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self.is_broken = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if asks_the_host(function, given):
            self.is_broken = True
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        if is_view(function):
            return function(*args, **kwargs)
        result = outlines(function, args, kwargs) if function._schema.returns else None
        self.operations.append((function, args, kwargs, [t for t in tree_leaves(result) if isinstance(t, Tensor)]))
        return result


def outlines(function: Any, args: Any, kwargs: Any) -> Any:
    """What an operation would return, without its numbers; what it would change and return is that tensor itself."""
    real: dict[int, tuple[Tensor, Tensor]] = {}

    def zeros_like(tensor: Tensor) -> Tensor:
        zeros = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).zero_()  # good as an index too
        real[id(zeros)] = tensor, zeros
        return zeros

    def outline(tensor: Tensor) -> Tensor:
        if id(tensor) in real:
            return real[id(tensor)][0]
        return tensor.detach().fill_(torch.nan if tensor.dtype.is_floating_point else 0)

    args, kwargs = tree_map_only(Tensor, zeros_like, (args, kwargs))
    return tree_map_only(Tensor, outline, function(*args, **kwargs))


def is_view(function: Any) -> bool:
    returned = function._schema.returns
    return bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)


class Card:
    """The pretended card, and what a test may want of it."""

    def __init__(self) -> None:
        self.device = "cpu"
        self.captures = self.replays = 0
        self.is_idle = False  # replays do nothing: what is left is the host's work
        self.pools = 0
        self.most_pools = 1000  # of as many slots it has the memory
        self.free = 2**36
        self._stream: Any = Stream()

    def take(self, _: Any = None) -> int:
        """Memory for a slot."""
        self.pools += 1
        return self.pools

    def give_back(self) -> None:
        self.pools = 0

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self._stream = self._stream, stream
        try:
            yield
        finally:
            self._stream = before

    def graph(self) -> Graph:
        return Graph(self)


class Stream:
    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5

    def record_event(self) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def wait_stream(self, _: Any) -> None: ...


class Graph:
    def __init__(self, card: Card) -> None:
        self.card, self.operations = card, list[Operation]()
        self._recorder = Recorder()

    def capture_begin(self, pool: int, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        if pool > self.card.most_pools:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        self._recorder.__enter__()

    def capture_end(self) -> None:
        recorder = self._recorder
        recorder.__exit__(None, None, None)
        if recorder.is_broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.card.captures += 1
        self.operations = recorder.operations

    def replay(self) -> None:
        self.card.replays += 1
        if not self.card.is_idle:
            self._again()

    @torch.no_grad()
    def _again(self) -> None:
        for function, args, kwargs, out in self.operations:
            again = [leaf for leaf in tree_leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)]
            for old, new in zip(out, again, strict=True):
                if old is not new:
                    old.copy_(new)


def as_on_a_card(optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """With the learning rate in a tensor, for every executor."""

    def resident(worker: Worker, rate: float | Tensor) -> Any:
        held = uncapturable(worker.config) or isinstance(rate, Tensor)
        return optimizer(worker, rate if held else torch.tensor(rate))

    return resident


def pretend(put: Callable[[Any, str, Any], None] = setattr) -> Card:
    """Put a pretended card in the place of `torch.cuda`, with `monkeypatch.setattr` or for good."""
    card = Card()
    put(CudaExecutor, "cannot_run", classmethod(lambda *_: ""))
    put(Worker, "optimizer", as_on_a_card(Worker.optimizer))
    fakes: dict[str, Any] = {
        "Stream": Stream,
        "stream": card.on,
        "current_stream": lambda _=None: card._stream,
        "CUDAGraph": card.graph,
        "graph_pool_handle": card.take,
        "empty_cache": card.give_back,
        "synchronize": lambda _=None: None,
        "memory_reserved": lambda _=None: card.pools * 2**30,
        "mem_get_info": lambda _=None: (card.free, 2**37),
        "get_rng_state": lambda _=None: torch.get_rng_state(),
    }
    for name, fake in fakes.items():
        put(torch.cuda, name, fake)
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.optim.") and hasattr(module, "_get_capturable_supported_devices"):
            put(module, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
    return card
