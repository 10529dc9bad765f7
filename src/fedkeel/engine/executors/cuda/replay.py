"""Passes over many batches as CUDA graphs: a statistics pass before training, an evaluation.

In such a pass the host does nothing but launch the same kernels again, and on small batches it is the slower side.
"""

import logging
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch

from fedkeel.core.client import Batch, one_by_one
from fedkeel.errors import first_line

log = logging.getLogger("fedkeel")
MOST_GRAPHS = 16  # batches of more shapes than this run eagerly


class Replays:
    """A `Repeat` for one stream: what comes a second time in one shape is captured, and replayed from then on.

    On any other stream it runs eagerly.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        self._pool, self._stream = pool, stream
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Batch]] = {}
        self._eager = False

    def __call__(self, key: Hashable, do: Callable[[Batch], None], batches: Iterable[Batch]) -> None:
        if torch.cuda.current_stream(self._stream.device) != self._stream:
            one_by_one(key, do, batches)
            return
        for batch in batches:
            whole = (key, batch.x.shape, batch.x.dtype, batch.x.stride())
            if whole not in self._graphs and whole in self._seen and len(self._graphs) < MOST_GRAPHS:
                self._capture(whole, do, batch)
            self._seen.add(whole)
            known = self._graphs.get(whole)
            if known is None:
                do(batch)
            else:
                graph, place = known
                place.x.copy_(batch.x)
                place.y.copy_(batch.y)
                graph.replay()

    def _capture(self, whole: Hashable, do: Callable[[Batch], None], batch: Batch) -> None:
        if self._eager:
            return
        place = Batch(torch.empty_like(batch.x), torch.empty_like(batch.y))
        try:
            self._graphs[whole] = capture(self._pool, lambda: do(place)), place
        except RuntimeError as error:
            self._eager = True
            torch.cuda.synchronize()
            log.info("A pass over the data is not captured: %s.", first_line(error))


def capture(pool: Any, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Not by `torch.cuda.graph`: it collects garbage and empties the cache each time, and there are many captures."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        work()
    finally:
        graph.capture_end()
    return graph
