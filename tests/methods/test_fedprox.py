from __future__ import annotations

import torch

from tests import tiny


def step(mu: float, epochs: int, method: str = "fedprox") -> dict[str, torch.Tensor]:
    """The client's weights after full-batch steps, from the same start."""
    on = tiny.federation(augment="")
    text = f"{method}(mu={mu})" if method == "fedprox" else method
    worker = tiny.setup(text, on=on, batch_size=14, learning_rate=0.1, local_epochs=epochs).worker
    return worker.train("ward", tiny.broadcast(worker), {})[0].weights


def test_without_mu_and_in_the_first_step_it_is_fedavg() -> None:
    for epochs, mu in ((3, 0.0), (1, 5.0)):
        plain, prox = step(0, epochs, "fedavg"), step(mu, epochs)
        assert all(torch.allclose(plain[name], prox[name], atol=1e-7) for name in plain)


def test_the_second_step_is_pulled_to_the_global_weights_by_mu_times_the_distance() -> None:
    start = dict(tiny.model().named_parameters())
    first, plain, prox = step(0, 1, "fedavg"), step(0, 2, "fedavg"), step(0.5, 2)
    for name, tensor in plain.items():
        # The gradient of mu/2 |w - w0|^2 at w1 is mu (w1 - w0); the rate is 0.1.
        expected = tensor - 0.1 * 0.5 * (first[name] - start[name].detach())
        torch.testing.assert_close(prox[name], expected, rtol=1e-4, atol=1e-7)
