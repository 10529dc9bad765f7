"""Apple's `pfl`, as its tutorials write it: FederatedAveraging on a SimulatedBackend. Arguments: batch size, threads.

It averages parameters alone, so the network has no batch norm. Under `torchrun` each process takes its share of the
clients, which is how its documentation speeds a simulation up.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
import work
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel


class Trained(work.SimpleCNN):
    def loss(self, x: torch.Tensor, y: torch.Tensor, eval: bool = False) -> torch.Tensor:
        self.eval() if eval else self.train()
        return F.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor, eval: bool = True) -> dict[str, Weighted]:
        return {"loss": Weighted(self.loss(x, y, eval).item() * len(y), len(y))}


class OnDemand(TrainingProcessCallback):
    """After each iteration, count; when those asked for are done, answer and wait for the next line of stdin."""

    def __init__(self) -> None:
        self.left, self.began = 0, 0.0

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
        if int(os.environ.get("RANK", "0")) == 0:
            self._answer_and_wait()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()  # or the other processes would train ahead, in another side's turn
        return False, Metrics()

    def _answer_and_wait(self) -> None:
        self.left -= 1
        if self.left <= 0:
            if self.began:
                print(json.dumps({"seconds": time.perf_counter() - self.began}), flush=True)
            line = sys.stdin.readline()
            if not line:
                os._exit(0)
            self.left, self.began = int(line), time.perf_counter()


def main(batch_size: int, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    images, labels = work.images_and_labels()
    images = work.normalised(images)

    def data_of(client: int) -> PyTorchTensorDataset:
        order = torch.randperm(work.SAMPLES)
        mine = work.of_client(client)
        return PyTorchTensorDataset([images[mine][order], labels[mine][order]], user_id=str(client))

    turn = iter(int(i) for _ in range(10**6) for i in np.arange(work.CLIENTS))
    training = FederatedDataset(data_of, lambda: next(turn))
    network = Trained(norm=False)
    model = PyTorchModel(
        model=network,
        local_optimizer_create=functools.partial(torch.optim.SGD, momentum=work.MOMENTUM),
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10**6,
            evaluation_frequency=10**6,
            train_cohort_size=work.CLIENTS,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=training, val_data=training),
        model,
        NNTrainHyperParams(local_batch_size=batch_size, local_num_epochs=1, local_learning_rate=work.LEARNING_RATE),
        NNEvalHyperParams(local_batch_size=500),
        callbacks=[OnDemand()],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
