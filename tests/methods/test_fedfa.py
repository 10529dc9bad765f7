from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from fedkeel import methods
from fedkeel.core.method import Method
from fedkeel.nn.draws import normal
from tests.methods.small import broadcast, small_model, started
from tests.methods.steps import train

CLIENTS = ["client0", "client1", "client2"]


def test_a_step_is_one_of_the_network_with_the_layers_formula_put_in(tmp_path):
    """One plain step against a network that computes x^ by the paper's formula where the layers are."""
    noise: list[Tensor] = []

    class Look(Method):
        name = "look"

        def gradients(self, client, recompute):
            for layer in client.model.feature_augmentation:
                noise.append(normal(layer.key, 2 * layer.counter + 1, (2, client.samples, layer.channels)).double())

    run = started(
        [methods.build("fedfa(p=1)"), Look()], tmp_path / "look", batch_size=64, learning_rate=0.1, momentum=0.0
    )
    update = train(run, "client1")
    order = run.setup.worker.plan("client1", 0).order
    x, y = run.setup.federation.images[order].double() / 255, run.setup.federation.labels[order]

    def drawn(x: Tensor, z: Tensor) -> Tensor:
        mu, sigma = x.mean(dim=(2, 3)), (x.var(dim=(2, 3), correction=0) + 1e-6).sqrt()
        # No round before this one: the clients' variances are equal, and gamma is 1.
        new_mu = mu + (2 * (mu.var(dim=0, correction=0) + 1e-6)).sqrt() * z[0]
        new_sigma = sigma + (2 * (sigma.var(dim=0, correction=0) + 1e-6)).sqrt() * z[1]
        each = (..., None, None)
        return new_sigma[each] * (x - mu[each]) / sigma[each] + new_mu[each]

    net = small_model().double().train()
    parts = list(net.encoder)
    hidden = drawn(nn.Sequential(*parts[:5])(x), noise[0])
    features = nn.Sequential(*parts[8:])(drawn(nn.Sequential(*parts[5:8])(hidden), noise[1]))
    nn.functional.cross_entropy(net.head(features), y).backward()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(
            update.weights[name].double(), parameter.detach() - 0.1 * parameter.grad, rtol=1e-3, atol=1e-5
        )


def test_the_server_sends_back_the_variance_over_the_clients(tmp_path):
    run = started("fedfa", tmp_path)
    sent = np.stack([train(run, name).extras["fedfa/mean"].double().numpy() for name in CLIENTS])
    run.round(0)
    found = run.server.extras["fedfa/mean_variance"].double().numpy()
    wanted = [sum((v - sum(column) / 3) ** 2 for v in column) / 3 for column in sent.T]
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    assert found.max() > 1e-4


def test_the_servers_variance_reaches_the_layers(tmp_path):
    seen: list[Tensor] = []

    class Look(Method):
        name = "look"

        def start(self, client):
            layers = client.model.feature_augmentation
            seen.append(torch.cat([layer.mean_variance for layer in layers]))
            seen.append(torch.cat([layer.std_variance for layer in layers]))

    run = started([methods.build("fedfa"), Look()], tmp_path)
    train(run)
    assert torch.equal(torch.cat(seen), torch.ones(28))  # the reference's start: every channel alike
    run.round(0)
    seen.clear()
    train(run, round=1)
    assert torch.equal(seen[0], run.server.extras["fedfa/mean_variance"])
    assert torch.equal(seen[1], run.server.extras["fedfa/std_variance"])
    assert not torch.equal(seen[0], seen[1])


def test_a_client_goes_on_from_its_own_averages_and_a_new_one_from_the_mean_of_the_others(tmp_path):
    started_from: list[Tensor] = []

    class Look(Method):
        name = "look"

        def start(self, client):
            started_from.append(torch.cat([layer.running_mean for layer in client.model.feature_augmentation]))

    run = started([methods.build("fedfa"), Look()], tmp_path)
    run.round(0)
    started_from.clear()
    run.round(1)
    run.setup.worker.train("client0", broadcast(run, 2), {})
    memories = [run.memory.look(name)["fedfa/mean"] for name in CLIENTS]
    assert not torch.equal(started_from[0], started_from[1])
    assert torch.equal(started_from[3], run.server.extras["fedfa/mean"])
    torch.testing.assert_close(started_from[3], torch.stack(memories).mean(dim=0))


def test_a_second_forward_as_gregs_draws_nothing_new(tmp_path):
    counts: list[int] = []

    class Look(Method):
        name = "look"

        def gradients(self, client, recompute):
            counts.append(int(client.model.feature_augmentation[0].counter))

    run = started([methods.build("fedfa(p=1)"), methods.build("greg"), Look()], tmp_path)
    for round in range(2):
        run.round(round)
    steps = [3, 2, 4]
    assert counts == [step for _ in range(2) for n in steps for step in range(1, n + 1)]
