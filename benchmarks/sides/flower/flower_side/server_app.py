"""FedAvg over all clients; the time after each round goes to the file that FLOWER_SIDE_TIMES names."""

from __future__ import annotations

import os
import time
from pathlib import Path

import work
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


def tell_time(_: int, __: ArrayRecord) -> MetricRecord | None:
    with Path(os.environ["FLOWER_SIDE_TIMES"]).open("a") as file:
        file.write(f"{time.time()}\n")
    return None


@app.main()
def main(grid: Grid, context: Context) -> None:
    clients = work.CLIENTS
    strategy = FedAvg(fraction_evaluate=0.0, min_evaluate_nodes=0, min_train_nodes=clients, min_available_nodes=clients)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(work.SimpleCNN().state_dict()),
        num_rounds=int(context.run_config["rounds"]),
        evaluate_fn=tell_time,
    )
