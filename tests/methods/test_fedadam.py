from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.methods import together
from tests.methods.small import broadcast, started, trained

CLIENTS = {"client0": 24, "client1": 16, "client2": 32}


def test_weights_take_adam_steps_from_v_of_tau_squared(tmp_path: Path) -> None:
    """Algorithm 2 in float64, over three rounds, from the updates that the clients send."""
    rate, beta1, beta2, tau = 0.02, 0.8, 0.95, 0.01
    run = started(f"fedadam(server_lr={rate}, beta1={beta1}, beta2={beta2}, tau={tau})", tmp_path)
    m = {name: np.zeros(t.shape) for name, t in run.server.weights.items()}
    v = {name: np.full(t.shape, tau**2) for name, t in run.server.weights.items()}
    for round in range(3):
        before = run.server.weights
        updates = list(trained(run, list(CLIENTS), broadcast(run, round)))
        run.round(round)
        for name, old in before.items():
            change = sum(u.weights[name].double().numpy() * CLIENTS[u.client] / 72 for u in updates) - old.numpy()
            m[name] = beta1 * m[name] + (1 - beta1) * change
            v[name] = beta2 * v[name] + (1 - beta2) * change**2
            expected = old.double().numpy() + rate * m[name] / (np.sqrt(v[name]) + tau)
            np.testing.assert_allclose(run.server.weights[name].numpy(), expected, rtol=1e-4, atol=1e-6)
        for name, new in run.server.statistics.items():
            if new.is_floating_point():
                mean = sum(u.statistics[name].double() * CLIENTS[u.client] / 72 for u in updates)
                torch.testing.assert_close(new.double(), mean, rtol=1e-5, atol=1e-6)
    assert run.server.memory.keys() == {f"fedadam/{part}/{name}" for part in "mv" for name in run.server.weights}


def test_statistics_and_counters_of_a_round_are_those_of_fedavg(tmp_path: Path) -> None:
    """NVFlare #1718."""
    runs = [started(text, tmp_path / text) for text in ("fedavg", "fedadam")]
    for run in runs:
        run.round(0)
    together.assert_close(runs[1].server.statistics, runs[0].server.statistics, atol=0)
    assert not torch.equal(runs[1].server.weights["head.weight"], runs[0].server.weights["head.weight"])
