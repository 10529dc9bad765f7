from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeel.engine.rounds import Federated
from tests.methods.small import broadcast, pixels, small_federation, started

CLIENTS = ["client0", "client1", "client2"]
MEAN, VAR = "encoder.1.running_mean", "encoder.1.running_var"


def activations(run: Federated, name: str, order: Tensor) -> Tensor:
    """Input of the first batch norm under the server's weights, in float64."""
    x = pixels(run.setup.federation, name)[torch.searchsorted(run.setup.federation[name].train, order)].double()
    weights = run.server.weights
    return F.conv2d(x, weights["encoder.0.weight"].double(), weights["encoder.0.bias"].double(), padding=1)


def client_moments(run: Federated, name: str, round: int) -> tuple[Tensor, Tensor]:
    """Plain means over the batches of this round of their means and biased variances."""
    plan = run.setup.worker.plan(name, round)
    batches = [activations(run, name, plan.order[start:stop]) for start, stop in plan.bounds if stop - start > 1]
    means = torch.stack([x.mean(dim=(0, 2, 3)) for x in batches])
    variances = torch.stack([x.var(dim=(0, 2, 3), correction=0) for x in batches])
    return means.mean(dim=0), variances.mean(dim=0)


def test_a_sample_is_normalised_the_same_whatever_else_is_in_its_batch(tmp_path):
    run = started("fbn", tmp_path)
    run.round(0)
    worker = run.setup.worker
    client = worker.begin("client0", broadcast(run, 1), {})
    x = pixels(run.setup.federation, "client0")[:8]
    other = torch.cat([x[:1], 5 * torch.rand(3, *x.shape[1:])])
    one, two = (worker.method.forward(client, batch).logits[0] for batch in (x, other))
    torch.testing.assert_close(one, two)
    alone = worker.model.eval()
    alone.load_state_dict(run.server.weights | run.server.statistics)
    torch.testing.assert_close(one, alone(x[:1]).logits[0])


@pytest.mark.parametrize("rest", [0, 1])
def test_a_client_sends_the_means_over_its_steps_and_a_single_sample_does_not_count(tmp_path, rest):
    federation = small_federation(([0, 1, 2, 3] * 6 + [0] * rest, [0, 1, 2, 3]))
    run = started("fbn", tmp_path, federation=federation, learning_rate=1e-12)  # the weights stay as they are
    run.round(0)
    update, _ = run.setup.worker.train("client0", broadcast(run, 1), {})
    mean, var = client_moments(run, "client0", 1)
    torch.testing.assert_close(update.statistics[MEAN], mean.float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(update.statistics[VAR], var.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_server_pools_around_the_pooled_mean_and_then_averages(tmp_path, weighting):
    run = started("fbn(momentum=0.2)", tmp_path, learning_rate=1e-12, weighting=weighting)
    before = run.server.statistics
    moments = [client_moments(run, name, 0) for name in CLIENTS]
    samples = 24 + 16 + 32
    counts = [24, 16, 32] if weighting == "samples" else [samples / 3] * 3
    mean = sum(n * m for n, (m, _) in zip(counts, moments, strict=True)) / samples
    var = sum(n * (v + (m - mean) ** 2) for n, (m, v) in zip(counts, moments, strict=True)) / (samples - 1)
    run.round(0)
    after = run.server.statistics
    torch.testing.assert_close(after[MEAN], (0.8 * before[MEAN] + 0.2 * mean).float(), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(after[VAR], (0.8 * before[VAR] + 0.2 * var).float(), rtol=1e-4, atol=1e-6)
    assert after["encoder.1.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_as_released_the_spread_is_around_the_moving_average(tmp_path, variant):
    """By hand, over two rounds: the lag of the average counts as spread."""
    run = started(f"fbn(variant={variant})", tmp_path, learning_rate=1e-12)
    mean, var = torch.zeros(6, dtype=torch.float64), torch.ones(6, dtype=torch.float64)
    for round in range(2):
        moments = [client_moments(run, name, round) for name in CLIENTS]
        pairs = list(zip((24, 16, 32), moments, strict=True))
        pooled = sum(n * m for n, (m, _) in pairs) / 72
        mean = 0.1 * pooled + 0.9 * mean
        centre = mean if variant == "released" else pooled
        var = 0.1 * sum(n * (v + (m - centre) ** 2) for n, (m, v) in pairs) / 71 + 0.9 * var
        run.round(round)
        torch.testing.assert_close(run.server.statistics[MEAN], mean.float(), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(run.server.statistics[VAR], var.float(), rtol=1e-4, atol=1e-6)
