from __future__ import annotations

import copy
import logging
import math

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.core import state
from fedkeel.core.client import Batch
from fedkeel.core.types import Classifier
from fedkeel.errors import MethodError
from fedkeel.formulas.aggregation import weighted_mean
from fedkeel.formulas.losses import consistency_kl
from fedkeel.nn.mixed_batch_norm import add_shares, mixed_statistics
from fedkeel.nn.paired_batch_norm import at_once, can_pair
from fedkeel.nn.surgery import batch_norms
from tests.methods.small import (
    CLASSES,
    broadcast,
    pixels,
    small_federation,
    small_model,
    started,
    trained,
)

CLIENTS = ["client0", "client1", "client2"]


# -- both branches as one batch ------------------------------------------------------------------------------
class Residual(nn.Module):
    """A residual block with two branches, and one batch norm that is called twice."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem, self.short = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn1, self.bn2, self.twice = norm(4), norm(4), norm(4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.stem(x)))
        x = self.bn2(self.short(x)) + self.twice(self.conv(x))
        return self.twice(x).mean(dim=(2, 3))


class NormWithActivation(nn.BatchNorm2d):
    """As in timm: the activation is part of the norm."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class Tokens(nn.Module):
    """As in LeViT: a batch norm over (samples x tokens, channels) behind one over images."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.linear, self.bn = nn.Linear(4, 5), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.stem(x).flatten(2).transpose(1, 2))
        x = self.bn(x.flatten(0, 1)).reshape_as(x)
        return (x + torch.softmax(x @ x.transpose(1, 2), dim=-1) @ x).mean(dim=1)


def chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


NETWORKS = {
    "residual": (lambda: (Residual(), 4), (3, 8, 8)),
    "activation": (lambda: (Residual(NormWithActivation), 4), (3, 8, 8)),
    "tokens": (lambda: (Tokens(), 5), (3, 6, 6)),
    "not tracking": (
        lambda: (
            chain(
                nn.BatchNorm2d(3, track_running_stats=False),
                nn.Conv2d(3, 4, 3),
                nn.BatchNorm2d(4),
                nn.Conv2d(4, 5, 6),
                nn.BatchNorm2d(5, track_running_stats=False),
                nn.Flatten(),
            ),
            5,
        ),
        (3, 8, 8),
    ),
}


def classifier(name: str) -> tuple[Classifier, Tensor]:
    torch.manual_seed(5)
    build, shape = NETWORKS[name]
    encoder, width = build()
    return Classifier(encoder, nn.Linear(width, 3), width, 3).double().train(), torch.randn(6, *shape).double()


def random_statistics(model: nn.Module) -> dict[str, Tensor]:
    torch.manual_seed(6)
    return {name: torch.rand_like(t) + 0.3 for name, t in model.named_buffers() if t.is_floating_point()}


def two_passes(model: nn.Module, statistics: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features and logits of both branches, by two passes; the second through a copy in evaluation mode that has the
    given statistics in its buffers and the very same parameters."""
    twin = copy.deepcopy(model)
    for (_, module), (_, original) in zip(twin.named_modules(), model.named_modules(), strict=True):
        for name, parameter in original._parameters.items():
            module._parameters[name] = parameter
    for module in twin.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.train(module.running_mean is None)
    state.load(twin, statistics)
    return *model(x), *twin(x)


def objective(logits: Tensor, under_global: Tensor) -> Tensor:
    return F.cross_entropy(logits, torch.arange(len(logits)) % 3) + 0.7 * consistency_kl(logits, under_global)


@pytest.mark.parametrize("name", NETWORKS)
def test_one_doubled_batch_is_two_passes(name):
    model, x = classifier(name)
    naive = copy.deepcopy(model)
    statistics = random_statistics(model)
    assert can_pair(model, x[:3])
    before = copy.deepcopy(model.state_dict())
    assert all(torch.equal(before[key], naive.state_dict()[key]) for key in before)  # trying it leaves no trace

    first, second = at_once(model, batch_norms(model), statistics, x)
    expected = two_passes(naive, statistics, x)
    for given, wanted in zip((*first, *second), expected, strict=True):
        torch.testing.assert_close(given, wanted, rtol=1e-10, atol=1e-12)
    loss, wanted = objective(first.logits, second.logits), objective(expected[1], expected[3])
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-12)
    loss.backward()
    wanted.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, naive.get_parameter(key).grad, rtol=1e-8, atol=1e-11, msg=key)
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, naive.state_dict()[key], rtol=1e-10, atol=1e-12, msg=key)
    assert all("forward" not in vars(norm) for norm in model.modules())


class Around(nn.Module):
    """A skip that starts before the first batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.conv(F.relu(self.bn(x)))).mean(dim=(2, 3))


class AcrossSamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn(x).mean(dim=(2, 3))
        return torch.softmax(x @ x.T, dim=1) @ x


UNPAIRABLE = {
    "around": Around,
    "across": AcrossSamples,
    "dropout": lambda: chain(nn.BatchNorm2d(3), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "reshaped": lambda: chain(nn.Flatten(0, 1), nn.Unflatten(0, (-1, 3)), FirstOverTokens()),
}


class FirstOverTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        return self.bn(tokens.flatten(0, 1)).reshape_as(tokens).mean(dim=1)


@pytest.mark.parametrize("name", UNPAIRABLE)
def test_a_network_that_cannot_be_doubled_runs_twice_and_says_so_once(name, tmp_path, caplog):
    torch.manual_seed(4)
    model = Classifier(UNPAIRABLE[name](), nn.Linear(3, CLASSES), 3, CLASSES)
    caplog.set_level(logging.INFO, "fedkeel")
    run = started("greg", tmp_path, model=model, rounds=3, batch_size=64)
    run.round(0)
    assert not caplog.records
    loss = one_step_loss(run, "client0")
    if name != "dropout":
        torch.testing.assert_close(loss, expected_loss(run, "client0", alpha=1.0), rtol=1e-5, atol=1e-6)
    run.round(1)
    run.round(2)
    assert ["runs twice in each step" in record.getMessage() for record in caplog.records] == [True]


# -- a federation --------------------------------------------------------------------------------------------
def one_step_loss(run, name: str) -> Tensor:
    """The loss that the client reports when all its data are one batch, in round 1."""
    update, _ = run.setup.worker.train(name, broadcast(run, round=1), {})
    return torch.tensor(update.metrics["loss"])


def expected_loss(run, name: str, alpha: float) -> Tensor:
    """Eqs. 5-6 by a loop over samples and classes, on a copy of the broadcast model."""
    worker, server = run.setup.worker, run.server
    model = copy.deepcopy(worker.model).train()
    state.load(model, server.weights, server.statistics)
    indices = run.setup.federation[name].train
    order = worker.plan(name, 1).order
    x = pixels(run.setup.federation, name)[torch.searchsorted(indices, order)]
    with torch.no_grad():
        _, q_b, _, q_g = two_passes(model, server.statistics, x)
    total = 0.0
    for b, g, label in zip(
        q_b.softmax(1).tolist(), q_g.softmax(1).tolist(), run.setup.federation.labels[order], strict=True
    ):
        divergence = sum(p * math.log(p / q) + q * math.log(q / p) for p, q in zip(b, g, strict=True)) / 2
        total += -math.log(b[label]) + alpha * divergence
    return torch.tensor(total / len(order))


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
def test_the_loss_of_a_real_step_is_that_of_equation_6(tmp_path, alpha):
    run = started(f"greg(alpha={alpha}, momentum=1)", tmp_path, batch_size=64)
    run.round(0)
    torch.testing.assert_close(
        one_step_loss(run, "client1"), expected_loss(run, "client1", alpha), rtol=1e-5, atol=1e-6
    )
    assert alpha == 0 or one_step_loss(run, "client1") > expected_loss(run, "client1", 0.0) + 1e-3


def test_the_first_round_is_that_of_fedavg_and_the_second_is_not(tmp_path):
    greg, fedavg = started("greg", tmp_path / "greg"), started("fedavg", tmp_path / "fedavg")
    for round, same in ((0, True), (1, False)):
        message = broadcast(fedavg, round)
        pairs = zip(trained(greg, CLIENTS, message), trained(fedavg, CLIENTS, message), strict=True)
        for one, other in pairs:
            assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights) is same
        fedavg.round(round)


def test_statistics_are_the_moving_average_in_every_round(tmp_path):
    run = started("greg(momentum=0.25, warm_start=false)", tmp_path)
    for round in range(3):
        before = run.server.statistics
        updates = list(trained(run, CLIENTS, broadcast(run, round)))
        total = sum(update.samples for update in updates)
        run.round(round)
        for name, new in run.server.statistics.items():
            sent = [update.statistics[name] for update in updates]
            if new.dtype == torch.int64:
                assert new == max(sent)
                continue
            mean = sum(s.double() * u.samples / total for s, u in zip(sent, updates, strict=True))
            torch.testing.assert_close(new.double(), 0.75 * before[name].double() + 0.25 * mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["greg", "greg(warm_start=true)", "greg(mode=mix)"])
def test_from_scratch_the_first_mean_is_taken_whole_and_then_averaged(tmp_path, method):
    warm, plain = started(method, tmp_path / "a"), started("fedavg", tmp_path / "b")
    warm.round(0)
    plain.round(0)
    for name, tensor in plain.server.statistics.items():
        torch.testing.assert_close(warm.server.statistics[name], tensor, rtol=0, atol=0)
    after_first = warm.server.statistics
    mean = weighted_mean([u.statistics for u in trained(warm, CLIENTS, broadcast(warm, 1))], [24, 16, 32])
    warm.round(1)
    name = "encoder.1.running_mean"
    torch.testing.assert_close(warm.server.statistics[name], 0.9 * after_first[name] + 0.1 * mean[name])


@pytest.mark.parametrize("given", ["a file", "statistics", "false"])
def test_the_average_begins_with_the_statistics_that_a_run_was_given(tmp_path, given):
    model, options = small_model(), {}
    if given == "a file":
        safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
        options["weights"] = str(tmp_path / "model.safetensors")
    elif given == "statistics":  # of a network that comes trained, whoever has loaded it
        model.encoder[6].running_mean.fill_(0.5)
    method = "greg(warm_start=false)" if given == "false" else "greg"
    run = started(method, tmp_path, model=model, **options)
    before, name = run.server.statistics, "encoder.1.running_var"
    mean = weighted_mean([u.statistics for u in trained(run, CLIENTS, broadcast(run))], [24, 16, 32])
    run.round(0)
    torch.testing.assert_close(run.server.statistics[name], 0.9 * before[name] + 0.1 * mean[name])


def test_a_single_sample_has_no_consistency_term_and_leaves_the_statistics_alone(tmp_path):
    run = started("greg", tmp_path, federation=small_federation(([0, 1, 2, 3] * 2 + [1], [2])))
    run.round(0)
    worker = run.setup.worker
    client = worker.begin("client0", broadcast(run, 1), {})
    x, y = pixels(run.setup.federation, "client0"), run.setup.federation.labels[run.setup.federation["client0"].train]
    worker.step(client, Batch(x[:8], y[:8]))  # now running and broadcast statistics differ
    before = copy.deepcopy(worker.model)
    loss = worker.step(client, Batch(x[8:], y[8:]))
    torch.testing.assert_close(loss, F.cross_entropy(copy.deepcopy(before).eval()(x[8:]).logits, y[8:]))
    for name, buffer in before.named_buffers():
        assert torch.equal(buffer, worker.model.get_buffer(name))
    assert not torch.equal(before.head.bias, worker.model.head.bias)


# -- the alternatives of Table 9 -----------------------------------------------------------------------------
def by_hand(mode: str, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor, bias: Tensor, share: float) -> Tensor:
    shape = (1, -1, 1, 1)
    batch_mean, batch_var = x.mean(dim=(0, 2, 3)), x.var(dim=(0, 2, 3), correction=0)

    def standardised(m: Tensor, v: Tensor) -> Tensor:
        return (x - m.view(shape)) / (v.view(shape) + 1e-5).sqrt()

    if mode == "global":
        y = standardised(mean, var)
    elif mode == "ensemble":
        y = (standardised(batch_mean, batch_var) + standardised(mean, var)) / 2
    else:
        y = standardised((1 - share) * batch_mean + share * mean, (1 - share) * batch_var + share * var)
    return y * weight.view(shape) + bias.view(shape)


@pytest.mark.parametrize("mode", ["global", "mix", "mix-learned", "ensemble"])
def test_an_alternative_normalises_by_its_formula_and_updates_from_the_batch(mode):
    torch.manual_seed(0)
    norm, x = nn.BatchNorm2d(3).double(), torch.randn(5, 3, 4, 4).double() * 2 + 1
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    model = nn.Sequential(norm)
    add_shares(batch_norms(model))
    norm.share.data.fill_(-1.2)
    plain = copy.deepcopy(norm)
    statistics = {"0.running_mean": torch.rand(3).double(), "0.running_var": torch.rand(3).double() + 0.5}
    share = {"mix": 0.3, "mix-learned": 1 / (1 + math.exp(1.2))}.get(mode, 0.0)
    x.requires_grad_()
    with mixed_statistics(batch_norms(model), statistics, mode, 0.3):
        y = model(x)
    expected = by_hand(mode, x, *statistics.values(), norm.weight, norm.bias, share)
    torch.testing.assert_close(y, expected)
    g, wanted = (torch.autograd.grad((out**3).sum(), [x, norm.weight, norm.bias])[0] for out in (y, expected))
    torch.testing.assert_close(g, wanted)
    plain(x)
    torch.testing.assert_close(norm.running_mean, plain.running_mean)
    torch.testing.assert_close(norm.running_var, plain.running_var)
    assert norm.num_batches_tracked == 1


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["fedbn+greg", "silobn+greg"])
def test_it_is_refused_where_statistics_never_travel(tmp_path, text):
    with pytest.raises(MethodError, match="global statistics"):
        started(text, tmp_path).round(0)


def test_a_model_without_batch_norm_or_without_running_statistics_is_refused(tmp_path):
    with pytest.raises(MethodError, match="batch norm"):
        started("greg", tmp_path / "a", model=small_model(lambda channels: nn.GroupNorm(2, channels)))
    model = small_model(lambda channels: nn.BatchNorm2d(channels, track_running_stats=False))
    with pytest.raises(MethodError, match="running statistics"):
        started("greg", tmp_path / "b", model=model).round(0)
