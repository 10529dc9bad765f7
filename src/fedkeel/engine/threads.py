"""Threads against processes: which is faster on the CPU for the step at hand, tried before a run begins.

A step of a small network does not fill several cores: clients had better train side by side, a process and a single
thread each. A step of a large one does: then one client after another with all threads is as fast, needs the memory of
one, and is faster where a round has fewer clients than there are cores.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import torch
import torch.nn.functional as F

from fedkeel import seeds
from fedkeel.engine.local import Worker

WORTH_TRYING = 400  # steps of a run on one core: fewer are over before a trial pays
SECONDS = 0.2  # of trying each way, once warm
FEWEST_STEPS = 2
# Equal runs shall choose alike, so that they are equal to the last bit: threads must be clearly faster.
MARGIN = 1.15
PATIENCE = 300.0  # seconds for a trial process to answer


def available_cores() -> int:
    """Those that this process may use, which in a container are fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_threads(worker: Worker, clients_a_round: int, note: Callable[[str], None]) -> int:
    """Threads of a local step: 1 for clients side by side in processes, or all for one client after another.

    Nothing that a run depends on is changed: the steps are of a copy of the model, in random states of their own.
    """
    threads, workers = torch.get_num_threads(), min(available_cores(), clients_a_round)
    if threads == 1 or available_cores() == 1:
        return 1
    if workers == 1:
        return threads
    steps = typical_steps(worker, clients_a_round)
    if sum(steps) * worker.config.rounds < WORTH_TRYING * workers:
        return 1
    try:
        side_by_side, alone = _side_by_side(worker, workers), _alone(worker)
    except Exception as error:  # whatever is wrong with a step is the run's to tell
        note(f"Threads were not tried against processes: {str(error).partition(chr(10))[0].rstrip('.')}.")
        return 1
    by_processes, by_threads = busiest(steps, workers) * side_by_side, sum(steps) * alone
    chosen = threads if by_threads * MARGIN < by_processes else 1
    note(
        f"A round takes about {by_processes:.2f} s in {workers} processes and {by_threads:.2f} s with {threads} "
        f"threads: {'one client after another' if chosen > 1 else 'clients side by side'}."
    )
    return chosen


def typical_steps(worker: Worker, clients: int) -> list[int]:
    """The local steps of a round's clients: of all of them, or of as many spread evenly over their sizes."""
    config = worker.config
    steps = sorted(-(-c.samples // config.batch_size) * config.local_epochs for c in worker.federation.clients)
    return [steps[(2 * i + 1) * len(steps) // (2 * clients)] for i in range(clients)]


def busiest(steps: Sequence[int], workers: int) -> int:
    """Steps of the worker that has the most, when the longest client always goes to whoever is free."""
    loads = [0] * workers
    for count in sorted(steps, reverse=True):
        loads[loads.index(min(loads))] += count
    return max(loads)


def _side_by_side(worker: Worker, workers: int) -> float:
    """Seconds of a step while every core is busy with one."""
    context = multiprocessing.get_context("fork")
    pipes = []
    processes = []
    try:
        for _ in range(workers):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_try_with_one_thread, args=(worker, there), daemon=True)
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        if not all(pipe.poll(PATIENCE) for pipe in pipes):
            raise TimeoutError("a step takes too long")
        return statistics.mean(float(pipe.recv_bytes()) for pipe in pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _try_with_one_thread(worker: Worker, pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send_bytes(str(_alone(worker)).encode())


def _alone(worker: Worker) -> float:
    """Seconds of a plain local step in this process: the least of a few, which other programs disturb least.

    Methods' own hooks stay out of it: they may have side effects."""
    config = worker.config
    # Not `worker.twin()`: one under a clock would count these steps too.
    model = copy.deepcopy(worker.model)
    twin = Worker(config, worker.federation, worker.method, model, worker.device, worker.store)
    site = max(worker.federation.clients, key=lambda client: client.samples)
    plan = twin.plan(site.name, 0)
    start, stop = plan.bounds[0]
    seconds: list[float] = []
    with seeds.default_generator(config.seed, "trial"):
        twin.model.train()
        optimizer = twin.optimizer(config.learning_rate)
        while (sum(seconds[1:]) < SECONDS and len(seconds) < 200) or len(seconds) <= FEWEST_STEPS:
            began = time.perf_counter()
            batch = twin.store.batch(
                plan.order[start:stop], plan.uniforms[start:stop], worker.federation.train_transform
            )
            twin.model.zero_grad(set_to_none=True)
            F.cross_entropy(twin.model(batch.x).logits, batch.y).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            seconds.append(time.perf_counter() - began)
    return min(seconds[1:])  # the first one readies what the others find
