from __future__ import annotations

from pathlib import Path

import torch

from fedkeel.core.messages import Broadcast
from tests import tiny
from tests.methods import together
from tests.methods.small import started, trained

CLIENTS = {"client0": 24, "client1": 16, "client2": 32}


def test_clients_start_ahead_by_the_momentum_and_the_model_moves_by_it(tmp_path: Path) -> None:
    """Algorithm 1 in float64: m <- lambda m + mean (theta_i - (w + lambda m)), w <- mean theta_i."""
    lambda_ = 0.6
    run = started(f"fedacg(lambda_={lambda_})", tmp_path)
    sent: list[Broadcast] = []
    plain = run.executor.map

    def watched(tasks, message):  # type: ignore[no-untyped-def]
        if tasks[0].do == "train":
            sent.append(message)
        return plain(tasks, message)

    run.executor.map = watched  # type: ignore[method-assign]
    momentum = {name: torch.zeros_like(t).double() for name, t in run.server.weights.items()}
    for round in range(3):
        before, statistics = run.server.weights, run.server.statistics
        tested = run.round(round)
        message = sent[-1]
        updates = list(trained(run, CLIENTS, message))
        sent.append(message)
        assert sent[-1].statistics is statistics  # only weights look ahead
        for name, old in before.items():
            ahead = old.double() + lambda_ * momentum[name]
            torch.testing.assert_close(sent[-1].weights[name].double(), ahead, rtol=1e-5, atol=1e-7)
            mean = sum(u.weights[name].double() * CLIENTS[u.client] / 72 for u in updates)
            momentum[name] = lambda_ * momentum[name] + mean - ahead
            torch.testing.assert_close(run.server.weights[name].double(), mean, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(
                run.server.weights[name].double(), old.double() + momentum[name], rtol=1e-5, atol=1e-6
            )
            assert torch.equal(tested.weights[name], run.server.weights[name])
    assert not torch.equal(sent[-1].weights["head.weight"], before["head.weight"])


def test_the_second_step_is_pulled_to_the_broadcast_weights_by_twice_beta() -> None:
    """The gradient of beta |theta - theta_0|^2 is 2 beta (theta - theta_0); without the 1/2 of FedProx."""

    def step(method: str, epochs: int) -> dict[str, torch.Tensor]:
        on = tiny.federation(augment="")
        worker = tiny.setup(method, on=on, batch_size=14, learning_rate=0.1, local_epochs=epochs, momentum=0.0).worker
        return worker.train("ward", tiny.broadcast(worker), {})[0].weights

    start = dict(tiny.model().named_parameters())
    first, plain, pulled = step("fedavg", 1), step("fedavg", 2), step("fedacg(beta=0.25)", 2)
    together.assert_close(step("fedacg(beta=0.25)", 1), first)
    for name, tensor in plain.items():
        expected = tensor - 0.1 * 2 * 0.25 * (first[name] - start[name].detach())
        torch.testing.assert_close(pulled[name], expected, rtol=1e-4, atol=1e-7)
    assert not torch.allclose(pulled["head.weight"], plain["head.weight"], atol=1e-5)
