from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeel import methods
from fedkeel.core.client import LocalClient
from fedkeel.core.method import Method
from fedkeel.core.state import Role, roles
from fedkeel.methods.fedsr import StochasticHead
from tests import tiny
from tests.methods.small import broadcast, names, started

SMALL = "fedsr(z_dim=5)"
LOCAL = ("head.r_mean", "head.r_spread", "head.scale")


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def some_head(seed: int = 0, **options: Any) -> StochasticHead:
    """A head of three features, z of two dimensions and three classes, with nothing at its initial value."""
    torch.manual_seed(seed)
    head = StochasticHead(3, options.get("z_dim", 2), 3, options.get("samples", 20)).double()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return head


# -- the terms ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("scale", [1.3, -0.7])
def test_the_divergence_is_that_of_two_normal_distributions_by_integration(scale):
    head = some_head().requires_grad_(False)
    head.scale.fill_(scale)  # one below zero has no logarithm
    labels = torch.tensor([2, 0])
    mean, deviation = head.distribution(torch.randn(2, 3).double())
    total = 0.0
    for i, label in enumerate(labels.tolist()):
        for j in range(2):
            m, s = scale * float(mean[i, j]), abs(scale) * float(deviation[i, j])
            r, q = float(head.r_mean[label, j]), softplus(float(head.r_spread[label, j]))
            x = torch.linspace(m - 12 * s, m + 12 * s, 200_001, dtype=torch.float64)
            p = torch.exp(-(((x - m) / s) ** 2) / 2) / (s * math.sqrt(2 * math.pi))
            logs = -(((x - m) / s) ** 2) / 2 - math.log(s) + ((x - r) / q) ** 2 / 2 + math.log(q)
            total += float(torch.trapezoid(p * logs, x)) / 2
    assert float(head.divergence(mean, deviation, labels)) == pytest.approx(total, rel=1e-6)


class Look(Method):
    """What the head sees and draws in each step."""

    name = "look"

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []  # noise and features

    def loss(self, client: LocalClient, batch: Any, output: Any) -> float:
        head = client.model.head
        mean, deviation = head.distribution(output.features.detach())
        noise = (head.sample(mean, deviation) - mean) / deviation
        self.seen.append((noise.detach(), output.features.detach().double()))
        return 0.0


def test_the_loss_of_a_real_step_is_that_of_the_paper(tmp_path):
    """By loops in float64, with the noise that the step drew."""
    look = Look()
    method = methods.build("fedsr(z_dim=5, lambda_l2r=0.3, lambda_cmi=0.2)")
    run = started([method, look], tmp_path, batch_size=64)
    worker = run.setup.worker
    with torch.no_grad():
        worker.entries["head.r_mean"].normal_()
        worker.initial_local = {name: worker.entries[name].detach().clone() for name in LOCAL}
    start = {name: tensor.detach().double() for name, tensor in worker.entries.items()}  # copies: they are float32
    update, _ = worker.train("client0", broadcast(run), {})
    noise, features = look.seen[0]
    indices = run.setup.federation["client0"].train
    order = worker.plan("client0", 0).order
    assert sorted(order.tolist()) == indices.tolist()
    entropy = length = divergence = 0.0
    for row, label in enumerate(run.setup.federation.labels[order].tolist()):
        both = start["head.moments.weight"] @ features[row] + start["head.moments.bias"]
        mu, sigma = both[:5].tolist(), [softplus(s) for s in both[5:].tolist()]
        z = [m + s * float(e) for m, s, e in zip(mu, sigma, noise[row], strict=True)]
        logits = start["head.classifier.weight"] @ torch.tensor(z).double() + start["head.classifier.bias"]
        entropy -= float(logits.log_softmax(0)[label])
        length += math.sqrt(sum(value**2 for value in z))
        for m, s, r, q in zip(mu, sigma, start["head.r_mean"][label], start["head.r_spread"][label], strict=True):
            q = softplus(float(q))
            divergence += math.log(q / s) + (s**2 + (m - float(r)) ** 2) / (2 * q**2) - 0.5
    expected = (entropy + 0.3 * length + 0.2 * divergence) / len(order)
    assert update.metrics["loss"] == pytest.approx(expected, rel=1e-4)
    assert 0.3 * length > 0.01 * len(order)
    assert 0.2 * divergence > 0.01 * len(order)


# -- noise -------------------------------------------------------------------------------------------------------
def test_every_step_round_and_client_draws_other_noise_and_the_same_when_repeated(tmp_path):
    draws = []
    for attempt in range(2):
        look = Look()
        run = started([methods.build(SMALL), look], tmp_path / str(attempt), batch_size=8)
        for round in range(2):
            for name in ("client0", "client1"):
                run.setup.worker.train(name, broadcast(run, round), {})
        draws.append([noise for noise, _ in look.seen if len(noise) == 8])
    first, second = draws
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(first, second, strict=True))
    assert len(first) == 10  # three steps of client0, two of client1, twice
    for i, one in enumerate(first):
        for other in first[:i]:
            assert (one - other).abs().max() > 0.1
    everything = torch.cat([noise.flatten() for noise in first])
    assert abs(float(everything.mean())) < 5 / math.sqrt(len(everything))
    assert float(everything.std()) == pytest.approx(1, abs=5 / math.sqrt(2 * len(everything)))


def test_a_second_pass_of_the_same_step_sees_the_same_noise():
    """So GReg compares predictions under two statistics and not under two samples."""
    worker = tiny.setup(SMALL).worker
    client = worker.begin("ward", tiny.broadcast(worker), {})
    x = torch.rand(6, 3, 8, 8)
    with torch.no_grad():
        one, two = client.model(x).logits, client.model(x).logits
        worker.method.inputs(client, x)
        three = client.model(x).logits
    assert torch.equal(one, two)
    assert not torch.allclose(one, three, atol=1e-3)


# -- testing -----------------------------------------------------------------------------------------------------
def test_evaluation_averages_the_probabilities_of_twenty_fixed_draws():
    head = some_head().eval()
    features = torch.randn(4, 3).double()
    mean, deviation = head.distribution(features)
    assert head.draws.shape == (20, 1, 2)
    total = torch.zeros(4, 3).double()
    for draw in head.draws[:, 0]:
        total += (head.classifier(mean + deviation * draw)).softmax(1)
    torch.testing.assert_close(head(features).exp(), total / 20)
    torch.testing.assert_close(head(features)[:1], head(features[:1]))  # whatever else is in the batch
    assert not torch.allclose(head(features), head.classifier(mean).log_softmax(1), atol=1e-3)
    many = some_head(samples=4000).eval()
    assert abs(float(many.draws.mean())) < 5 / math.sqrt(8000)
    assert float(many.draws.std()) == pytest.approx(1, abs=5 / math.sqrt(16000))


# -- what travels ------------------------------------------------------------------------------------------------
def test_reference_distributions_stay_on_the_client_and_are_kept(tmp_path):
    run = started("fedsr(z_dim=5, lambda_cmi=0.1)", tmp_path)
    role_of = roles(run.setup.worker.model, run.method)
    assert {name for name, role in role_of.items() if role is Role.LOCAL} == set(LOCAL)
    assert not any("draws" in name or "key" in name or name.endswith("step") for name in role_of)
    run.round(0)
    assert not any(name in run.server.weights for name in LOCAL)
    kept = {name: run.memory.look(name)["local/head.r_mean"] for name in names(run)}
    assert all(tensor.abs().max() > 0 for tensor in kept.values())
    assert not torch.equal(kept["client0"], kept["client1"])
    client = run.setup.worker.begin("client0", broadcast(run, 1), run.memory.look("client0"))
    assert torch.equal(client.model.head.r_mean, kept["client0"])
    stranger = run.setup.worker.begin("client0", broadcast(run, 1), {})
    assert stranger.model.head.r_mean.abs().max() == 0


# -- everywhere --------------------------------------------------------------------------------------------------
