"""The round loop of Fedkeel, on made-up clients, under any executor; under `ray` on as many local nodes as one likes.

One argument, a table in JSON: `executor`, `clients`, `samples` (of each, or a list), `batch`, `model`, `nodes` (raylets
of this machine; 0: Ray is started by the executor itself), `cores` that each says it has (1), and whatever else is an
option of a run. Every answer has the seconds of the rounds by phase, the size of a model, and the bytes that the
machine has sent to itself meanwhile.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from fedkeel.config import PYTHON_OBJECT, Config
from fedkeel.data.federation import Client, Federation, no_indices
from fedkeel.data.transforms import parse_transforms
from fedkeel.engine.executors.executor import available_cores
from fedkeel.engine.executors.ray import ENVIRONMENT
from fedkeel.engine.memory import ClientMemory
from fedkeel.engine.rounds import Federated
from fedkeel.engine.setup import prepare
from fedkeel.observer import Observer


class Nowhere:
    """Where a run is written: nowhere. The seconds of its rounds are added up."""

    directory = Path()
    extended = ()

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.memory = ClientMemory(Path())  # without a limit or a checkpoint, no file is written

    def append(self, record: dict[str, Any]) -> None: ...
    def checkpoint(self, checkpoint: Any) -> None: ...
    def truncate(self, size: int = 0) -> None: ...
    def latest(self, note: Any) -> None: ...

    def append_timing(self, record: dict[str, Any]) -> None:
        self.seconds.update({"train": record["train"], "aggregate": record["aggregate"]})
        self.seconds.update({"clients": sum(record["clients"].values())})


def made_up(clients: int, samples: int | list[int], pixels: int = 32) -> Federation:
    generator = torch.Generator().manual_seed(0)
    sizes = [samples] * clients if isinstance(samples, int) else samples
    images = torch.randint(0, 256, (sum(sizes), 3, pixels, pixels), dtype=torch.uint8, generator=generator)
    everything = torch.arange(len(images)).split(sizes)
    sites = tuple(Client(f"c{i}", "made-up", mine, no_indices(), mine[:1]) for i, mine in enumerate(everything))
    normalise = parse_transforms("normalise(like=cifar10)")
    classes = tuple(str(i) for i in range(10))
    return Federation("made-up", images, torch.arange(len(images)) % 10, classes, sites, normalise, normalise)


def start_cluster(nodes: int, cores: int) -> Any:
    import ray
    from ray.cluster_utils import Cluster

    os.environ.update(ENVIRONMENT)  # as a Ray that the executor starts itself
    cluster = Cluster()
    for _ in range(nodes):
        cluster.add_node(num_cpus=cores, object_store_memory=300 * 2**20)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    return cluster


def loopback() -> int:
    """Bytes that this machine has sent to itself."""
    path = Path("/proc/net/dev")
    lines = path.read_text().splitlines() if path.exists() else []
    return next((int(line.split()[9]) for line in lines if line.strip().startswith("lo:")), 0)


def main(asked: dict[str, Any]) -> None:
    clients, samples, nodes = (asked.pop(name) for name in ("clients", "samples", "nodes"))
    cores = asked.pop("cores", 1)
    config = Config(
        batch_size=asked.pop("batch"),
        learning_rate=1e-3,
        momentum=0.9,
        device="cpu",
        data=PYTHON_OBJECT,
        rounds=10**6,
        evaluate_every=10**6,
        checkpoint_every=10**6,
        **asked,
    )
    cluster = start_cluster(nodes, cores) if nodes else None
    setup = prepare(config, federation=made_up(clients, samples))
    executor: Any = setup.executor()
    store = Nowhere()
    run, number = Federated(setup, executor, store, Observer()), 0  # type: ignore[arg-type]
    while config.executor == "ray" and len(executor._actors) < (nodes or available_cores()) * cores:
        executor._muster()  # a run begins with those that are there; what is measured, with all
        time.sleep(0.1)
    model = run.server.weights | run.server.statistics
    size = sum(tensor.nbytes for tensor in model.values())
    for line in sys.stdin:
        before, store.seconds = loopback(), Counter()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            run.round(number)
            number += 1
        seconds, cpu = time.perf_counter() - began, time.process_time() - used
        answer = {"seconds": seconds, "cpu": cpu, **store.seconds, "model": size, "loopback": loopback() - before}
        print(json.dumps(answer), flush=True)
    executor.close()
    if cluster is not None:
        import ray

        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
