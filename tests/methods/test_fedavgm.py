from __future__ import annotations

from pathlib import Path

import torch

from tests.methods import together
from tests.methods.small import broadcast, started, trained

CLIENTS = {"client0": 24, "client1": 16, "client2": 32}


def test_weights_move_with_momentum_and_statistics_do_not(tmp_path: Path) -> None:
    """By the formula in float64, over three rounds, from the updates that the clients send."""
    run = started("fedavgm(beta=0.7, server_lr=0.5)", tmp_path)
    velocity = {name: torch.zeros_like(t).double() for name, t in run.server.weights.items()}
    for round in range(3):
        before = run.server.weights
        updates = list(trained(run, list(CLIENTS), broadcast(run, round)))
        run.round(round)
        for name, old in before.items():
            mean = sum(u.weights[name].double() * CLIENTS[u.client] / 72 for u in updates)
            velocity[name] = 0.7 * velocity[name] + mean - old.double()
            torch.testing.assert_close(
                run.server.weights[name].double(), old.double() + 0.5 * velocity[name], rtol=1e-4, atol=1e-6
            )
        for name, new in run.server.statistics.items():
            if new.is_floating_point():
                mean = sum(u.statistics[name].double() * CLIENTS[u.client] / 72 for u in updates)
                torch.testing.assert_close(new.double(), mean, rtol=1e-5, atol=1e-6)
    assert run.server.memory.keys() == {f"fedavgm/{name}" for name in run.server.weights}


def test_without_momentum_it_is_fedavg(tmp_path: Path) -> None:
    runs = [started(text, tmp_path / text) for text in ("fedavg", "fedavgm(beta=0)")]
    for run in runs:
        for round in range(2):
            run.round(round)
    together.assert_close(runs[1].server.weights, runs[0].server.weights)
