"""Fedkeel with its defaults for a CPU. Arguments: batch size, executor, norm."""

from __future__ import annotations

import sys

import torch
import work

from fedkeel.config import Config
from fedkeel.core.messages import Broadcast, Update
from fedkeel.data.federation import Client, Federation, no_indices
from fedkeel.data.transforms import parse_transforms
from fedkeel.engine.setup import prepare
from fedkeel.engine.tasks import Result, Task
from fedkeel.formulas.aggregation import weighted_mean


def main(batch_size: int, executor_name: str, norm: bool) -> None:
    images, labels = work.images_and_labels()
    everything = torch.arange(len(images))
    clients = tuple(
        Client(f"c{i}", "made-up", everything[work.of_client(i)], no_indices(), torch.arange(10))
        for i in range(work.CLIENTS)
    )
    normalise = parse_transforms("normalise(like=cifar10)")
    classes = tuple(str(i) for i in range(10))
    federation = Federation("made-up", images, labels, classes, clients, normalise, normalise)
    config = Config(
        batch_size=batch_size,
        learning_rate=work.LEARNING_RATE,
        momentum=work.MOMENTUM,
        executor=executor_name,
        rounds=100_000,
        device="cpu",
        model="simple_cnn" if norm else "simple_cnn(norm=false)",
    )
    setup = prepare(config, federation=federation)
    executor, layout, model = setup.executor(), setup.worker.layout, setup.worker.model
    assert model.state_dict().keys() == work.SimpleCNN(norm).state_dict().keys()
    weights, statistics = layout.extract(model, layout.weights), layout.extract(model, layout.statistics)
    number = 0

    def one_round() -> None:
        nonlocal weights, statistics, number
        found: dict[str, Update] = {}
        tasks = [Task("train", client.name) for client in clients]
        for result in executor.map(tasks, Broadcast(number, 100, weights, statistics)):
            assert isinstance(result, Result), result
            found[result.client] = result.outcome
        updates = [found[client.name] for client in clients]
        shares = [float(update.samples) for update in updates]
        weights = weighted_mean([update.weights for update in updates], shares)
        statistics = weighted_mean([update.statistics for update in updates], shares)
        number += 1

    work.rounds_on_demand(one_round)
    executor.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "norm")
