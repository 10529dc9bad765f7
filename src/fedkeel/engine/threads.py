"""Threads against processes: which is the faster way to use the cores of a CPU for the step at hand.

A step of a small network does not fill several cores: clients had better train side by side, a process and a single
thread each. A step of a large one does: then one client after another with all threads is as fast, and faster where the
clients of a round do not divide evenly among the cores.

The choice decides the last bits of a result, so equal runs must choose alike. It follows from the arithmetic in a step,
not from a stopwatch.
"""

import copy
import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fedkeel.engine.batches import probe
from fedkeel.engine.footprint import KEPT
from fedkeel.engine.local import Worker

FILLING = 2e8
"""Operations of a step at which threads save half of what they can. With `simple_cnn` on two cores
(`benchmarks/cpu.py serial`) a second thread made steps of 7e7 (batch 4) 1.23 times as fast, of 6e8 (batch 32) 1.67."""
FULL = 0.9  # share of the cores that threads use in a very large step
MOST_LOOKED_AT = 1000  # clients, for their sizes


def available_cores() -> int:
    """Those that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_threads(worker: Worker, clients_a_round: int, note: Callable[[str], None]) -> int:
    """Threads of a local step: 1 for clients side by side in processes, or all for one client after another."""
    threads, workers = torch.get_num_threads(), min(available_cores(), clients_a_round)
    if threads == 1 or available_cores() == 1:
        return 1
    if workers == 1:
        return threads
    operations = step_operations(worker)
    if operations is None:
        return 1
    steps = typical_steps(worker, clients_a_round)
    speed_up = 1 + (FULL * threads - 1) * operations / (operations + FILLING)  # of a step with all threads
    if sum(steps) / speed_up >= busiest(steps, workers):
        return 1
    note(f"A step of {operations / 1e9:.1f} GFLOP fills {threads} cores: one client after another, with all threads.")
    return threads


def step_operations(worker: Worker) -> int | None:
    """Floating-point operations in the layers of a local step, from a pass of one image; None for a network that
    resists. PyTorch's own counter would import its compiler, which takes longer than the rest of the set-up."""
    image, found = probe(worker.federation, training=True).to(worker.device), list[int]()

    def count(layer: nn.Module, _inputs: object, output: Tensor) -> None:
        found.append(2 * output.numel() * layer.weight[0].numel())  # type: ignore[index]

    try:
        model = copy.deepcopy(worker.model).eval()
        for layer in (layer for layer in model.modules() if isinstance(layer, KEPT)):
            layer.register_forward_hook(count)
        with torch.no_grad():
            model(image)
    except Exception:  # whatever is wrong with a step is the run's to tell
        return None
    return 3 * worker.config.batch_size * sum(found)  # forward, and twice as much backward


def typical_steps(worker: Worker, clients: int) -> list[int]:
    """The local steps of a round's clients: of all of them, or of as many spread evenly over their sizes."""
    config, sites = worker.config, worker.federation.clients
    looked_at = [sites[i] for i in range(0, len(sites), -(-len(sites) // MOST_LOOKED_AT))]
    steps = sorted(-(-site.samples // config.batch_size) * config.local_epochs for site in looked_at)
    return [steps[(2 * i + 1) * len(steps) // (2 * clients)] for i in range(clients)]


def busiest(steps: Sequence[int], workers: int) -> int:
    """Steps of the worker that has the most, when the longest client always goes to whoever is free."""
    loads = [0] * workers
    for count in sorted(steps, reverse=True):
        loads[loads.index(min(loads))] += count
    return max(loads)
