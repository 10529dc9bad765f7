"""How long the host takes for a round of the executor `cuda`, without a GPU: what a card cannot be faster than.

    python benchmarks/host.py [--clients 10 100] [--repeats 15] [--profile 30]

A round of the loop on the pretended card of the tests, whose replays do nothing: planning, loading, filling, launching,
finishing, reading, aggregating, recording. `simple_cnn` with as many tensors as ever, but narrow and on images of 8 px
that are not augmented, so that what the CPU has to do in a GPU's place is little. It is in the figures all the same;
what a launch costs in CUDA's driver is not. Clients of 125 steps of batch 4, graphs of two steps.

CPU time of one thread, in milliseconds: the median of the rounds, the lowest and the highest; of that for each client;
and of that between rounds, when a card would have nothing to do. Beside it, of one more round, how many graphs are
replayed, how many operations are launched one by one, and how often the host waits for a number: on a GPU each launch
takes the host microseconds, and each wait leaves the card idle. `--profile N`: which N functions took most of the time.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the tests' card

from tests.engine.executors.pretended import is_view, pretend

from fedkeel.engine.rounds import Federated
from fedkeel.engine.setup import prepare
from fedkeel.experiments.bench import ROWS, made_up
from fedkeel.experiments.bench.sides import configured
from fedkeel.observer import Observer


class Rounds:
    """Rounds of one run, warm, that neither evaluate nor write anything."""

    def __init__(self, clients: int) -> None:
        row = replace(ROWS["small10"], clients=clients, model="simple_cnn(width=2)", pixels=8)
        config = configured(row, "cuda", precision="float32", workers=min(clients, 32), evaluate_every=1000)
        federation = made_up(row)
        federation = replace(federation, train_transform=federation.test_transform)
        setup = prepare(config.replace(device="cpu", checkpoint_every=1000), federation=federation)
        store: Any = SimpleNamespace(append=json.dumps, append_timing=json.dumps, extended=())
        self.loop, self.number = Federated(setup, setup.executor(), store, Observer()), 0
        self.loop.executor._length.settle()
        card.is_idle = True
        self.between: list[float] = []  # milliseconds in which a card would have had nothing to do
        self._watch(self.loop.executor)
        for _ in range(3):
            self.milliseconds()

    def _watch(self, executor: Any) -> None:
        read, advance, idle = executor._read, executor._advance, list[float]()

        def reading(ended: Any) -> Any:
            idle.append(time.process_time())
            return read(ended)

        def advancing(slot: Any, ended: Any) -> None:
            if idle:
                self.between.append(1000 * (time.process_time() - idle.pop()))
            advance(slot, ended)

        executor._read, executor._advance = reading, advancing

    def milliseconds(self) -> float:
        began = time.process_time()
        self.loop.round(self.number)
        self.number += 1
        return 1000 * (time.process_time() - began)


class Counting(TorchDispatchMode):
    """What is launched inside, and how often the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.waits = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += not is_view(function)
        self.waits += function.name() in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal")
        return function(*args, **(kwargs or {}))

    def round(self, rounds: Rounds) -> dict[str, int]:
        plain, replays = Tensor.tolist, card.replays

        def waiting(tensor: Tensor) -> Any:
            self.waits += 1
            return plain(tensor)

        Tensor.tolist = waiting  # type: ignore[method-assign]
        try:
            with self:
                rounds.milliseconds()
        finally:
            Tensor.tolist = plain  # type: ignore[method-assign]
        return {"graphs": card.replays - replays, "operations": self.operations, "waits": self.waits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", nargs="+", type=int, default=[10, 100])
    parser.add_argument("--repeats", type=int, default=15, help="rounds that are timed")
    parser.add_argument("--profile", type=int, default=0, metavar="N", help="show the N functions that took most")
    options = parser.parse_args()
    for clients in options.clients:
        rounds, load = Rounds(clients), os.getloadavg()[0]
        profile = cProfile.Profile()
        if options.profile:
            profile.enable()
        taken = [rounds.milliseconds() for _ in range(options.repeats)]
        profile.disable()
        figures = {"median": statistics.median(taken), "lowest": min(taken), "highest": max(taken)}
        figures |= {"client": statistics.median(taken) / clients, "between": statistics.median(rounds.between)}
        figures |= {"load": load, **Counting().round(rounds)}
        print(json.dumps({"clients": clients} | {name: round(number, 2) for name, number in figures.items()}))
        if options.profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(options.profile)


if __name__ == "__main__":
    torch.set_num_threads(1)
    card = pretend()
    main()
