from __future__ import annotations

import dataclasses

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from fedkeel import methods
from fedkeel.core.client import LocalClient
from fedkeel.core.composition import Composition
from fedkeel.data.transforms import parse_transforms
from fedkeel.engine.rounds import Federated
from fedkeel.errors import MethodError
from tests.methods.small import (
    Probe,
    broadcast,
    pixels,
    small_federation,
    small_model,
    started,
    trained,
)

MEAN, VAR, ALPHA = "encoder.1.running_mean", "encoder.1.running_var", "encoder.1.alpha"
CLIENTS = ["client0", "client1", "client2"]


def activations(run: Federated, weights: dict[str, Tensor], name: str) -> Tensor:
    """Input of the first batch norm, by the plain formula, in float64: (samples, channels, height, width)."""
    x = pixels(run.setup.federation, name).double()
    w, b = weights["encoder.0.weight"].double(), weights["encoder.0.bias"].double()
    return nn.functional.conv2d(x, w, b, padding=1)


def union_moments(run: Federated, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance of the activations of all clients' data together; the paper divides by N - 1 samples."""
    everything = torch.cat([activations(run, weights, name) for name in CLIENTS])
    n = len(everything)
    variance = everything.var(dim=(0, 2, 3), correction=0) * n / (n - 1)
    return everything.mean(dim=(0, 2, 3)).float(), variance.float()


@pytest.mark.parametrize("size", [4, 64])
def test_global_statistics_move_towards_those_of_the_union_of_all_data(tmp_path, size, monkeypatch):
    monkeypatch.setattr("fedkeel.methods.hbn.PASS_BATCH", size)
    run = started("hbn(record=batch, momentum=0.3)", tmp_path)
    sent = run.server.weights
    for round in range(2):
        before, sent = run.server.statistics, run.server.weights
        run.round(round)
    mean, variance = union_moments(run, sent)
    torch.testing.assert_close(run.server.statistics[MEAN], 0.7 * before[MEAN] + 0.3 * mean)
    torch.testing.assert_close(run.server.statistics[VAR], 0.7 * before[VAR] + 0.3 * variance)


def test_deeper_layers_see_inputs_normalised_with_the_mixture(tmp_path):
    run = started("hbn(record=batch, momentum=1)", tmp_path)
    weights = {name: tensor.double() for name, tensor in run.server.weights.items()}
    inputs = []
    for name in CLIENTS:
        x = activations(run, weights, name)
        mean = 0.5 * x.mean(dim=(0, 2, 3), keepdim=True)  # alpha = 0 and global statistics of mean 0, variance 1
        var = 0.5 * x.var(dim=(0, 2, 3), correction=0, keepdim=True) + 0.5
        x = nn.functional.max_pool2d(torch.relu((x - mean) / (var + 1e-5).sqrt()), 2)
        inputs.append(nn.functional.conv2d(x, weights["encoder.5.weight"], weights["encoder.5.bias"], padding=1))
    everything = torch.cat(inputs)
    run.round(0)
    expected = everything.var(dim=(0, 2, 3), correction=0) * len(everything) / (len(everything) - 1)
    torch.testing.assert_close(run.server.statistics["encoder.6.running_var"], expected.float())


def test_by_default_the_mixture_is_recorded(tmp_path):
    run = started("hbn(warm_start=false)", tmp_path)
    update, _ = run.setup.worker.train("client1", broadcast(run), {})
    x = activations(run, run.server.weights, "client1")  # one batch: half of it, half of mean 0 and variance 1
    torch.testing.assert_close(update.statistics[MEAN], 0.5 * x.mean(dim=(0, 2, 3)).float())
    torch.testing.assert_close(update.statistics[VAR], 0.5 * x.var(dim=(0, 2, 3), correction=0).float() + 0.5)


def test_the_factor_never_travels_differs_between_clients_and_is_kept(tmp_path):
    arrived: dict[str, list[Tensor]] = {name: [] for name in CLIENTS}

    def look(client: LocalClient) -> None:
        arrived[client.name].append(client.model.get_parameter(ALPHA).detach().clone())

    run = started([methods.build("hbn"), Probe(start=look)], tmp_path)
    update, memory = run.setup.worker.train("client0", broadcast(run), {})
    sent = update.weights.keys() | update.statistics.keys() | update.extras.keys() | run.server.weights.keys()
    assert not any("alpha" in name for name in sent)
    assert "encoder.1.weight" in sent
    arrived["client0"].clear()

    run.round(0)
    trained = {name: run.memory.look(name)[f"local/{ALPHA}"].clone() for name in CLIENTS}
    run.round(1)
    for name in CLIENTS:
        assert torch.equal(arrived[name][0], torch.zeros(6))
        assert not torch.equal(trained[name], torch.zeros(6))
        assert torch.equal(arrived[name][1], trained[name])
    assert not torch.equal(trained["client0"], trained["client1"])
    assert torch.equal(trained["client0"], memory[f"local/{ALPHA}"])


@pytest.mark.parametrize("labels", [[c for c in range(4) for _ in range(25)], [3, 1, 0, 2, 2] * 20])
def test_the_pass_sees_every_class_that_the_client_has_and_the_released_one_the_lowest(tmp_path, labels):
    moments = {}
    for variant in ("paper", "released"):
        run = started(f"hbn(record=batch, variant={variant})", tmp_path / variant, small_federation([labels]))
        moments[variant] = run.setup.worker.train("client0", broadcast(run), {})[0].statistics[MEAN]
        x = activations(run, run.server.weights, "client0").float()
    torch.testing.assert_close(moments["paper"], x.mean(dim=(0, 2, 3)))
    first = [i for c in range(4) for i, label in enumerate(labels) if label == c][:64]
    torch.testing.assert_close(moments["released"], x[first].mean(dim=(0, 2, 3)))
    assert (moments["paper"] - moments["released"]).abs().max() > 1e-3


def test_a_part_of_the_samples_is_drawn_at_random_and_all_of_them_count(tmp_path):
    in_order = small_federation([[c for c in range(4) for _ in range(25)], [0, 1]])
    run = started("hbn(record=batch, stats_samples=50, momentum=1)", tmp_path, in_order)
    updates = [run.setup.worker.train(name, broadcast(run), {})[0] for name in ("client0", "client1")]
    means = [update.statistics[MEAN] for update in updates]
    x = activations(run, run.server.weights, "client0").float()
    assert not torch.allclose(means[0], x.mean(dim=(0, 2, 3)), atol=1e-5)
    assert not torch.allclose(means[0], x[:50].mean(dim=(0, 2, 3)), atol=1e-5)
    run.round(0)
    torch.testing.assert_close(run.server.statistics[MEAN], (100 * means[0] + 2 * means[1]) / 102)


@pytest.mark.parametrize("method", ["hbn", "hbn(warm_start=true)", "hbn(mix=global)"])
def test_from_scratch_the_first_moments_are_taken_whole(tmp_path, method):
    run = started(method, tmp_path)
    sent = run.server.weights
    run.round(0)
    for name, moment in zip((MEAN, VAR), union_moments(run, sent), strict=True):
        torch.testing.assert_close(run.server.statistics[name], moment)
    before = run.server.statistics[MEAN]
    run.round(1)
    assert 0 < (run.server.statistics[MEAN] - before).abs().max() < 0.02 * before.abs().max()


@pytest.mark.parametrize("given", ["a file", "statistics", "warm_start=false", "variant=released"])
def test_there_is_no_warm_start_where_the_run_starts_from_something(tmp_path, given):
    model, options = small_model(), {}
    if given == "a file":
        safetensors.torch.save_file(model.state_dict(), tmp_path / "model.safetensors")
        options["weights"] = str(tmp_path / "model.safetensors")
    elif given == "statistics":  # of a network that comes trained, whoever has loaded it
        model.encoder[6].running_var.fill_(2.0)
    run = started(f"hbn({given if '=' in given else ''})", tmp_path, model=model, **options)
    before = run.server.statistics
    sent = [update.statistics for update in trained(run, CLIENTS, broadcast(run))]
    run.round(0)
    mean = sum(n * s[MEAN] for n, s in zip((24, 16, 32), sent, strict=True)) / 72
    momentum = 0.002 if "released" in given else 0.01
    torch.testing.assert_close(run.server.statistics[MEAN], (1 - momentum) * before[MEAN] + momentum * mean)


def test_evaluation_uses_fresh_statistics_of_the_new_weights_on_a_copy(tmp_path):
    run = started("hbn(record=batch, warm_start=false)", tmp_path)
    before, sent = run.server.statistics, run.server.weights
    tested = run.round(0)
    for statistics, mean in (
        (tested.statistics, union_moments(run, run.server.weights)[0]),
        (run.server.statistics, 0.99 * before[MEAN] + 0.01 * union_moments(run, sent)[0]),
    ):
        torch.testing.assert_close(statistics[MEAN], mean)
    assert run.traffic["questions"] == 1


def test_the_pass_leaves_dropout_out(tmp_path):
    moments = []
    for dropout in (0.0, 0.9):
        run = started("hbn", tmp_path / str(dropout), model=small_model(dropout=dropout))
        moments.append(run.setup.worker.train("client0", broadcast(run), {})[0].statistics)
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[0])


# -- Table 6 ---------------------------------------------------------------------------------------------------
def test_moving_average_statistics_are_of_the_batches_of_training(tmp_path):
    run = started("hbn(statistics=moving-average)", tmp_path, learning_rate=1e-8)
    update, _ = run.setup.worker.train("client0", broadcast(run), {})
    # Without movement of the weights: 24 samples in batches of 8, each of which gets a share of 0.1.
    x = activations(run, run.server.weights, "client0").float()
    mean = update.statistics[MEAN] / (1 - 0.9**3)
    torch.testing.assert_close(mean, x.mean(dim=(0, 2, 3)), rtol=0.1, atol=0.02)
    assert torch.equal(run.round(0).statistics[MEAN], run.server.statistics[MEAN])
    assert run.traffic["questions"] == 0


def test_a_plain_mean_misses_how_far_apart_the_clients_are(tmp_path):
    variances = {}
    for pooling in ("pooled", "mean"):
        run = started(f"hbn(pooling={pooling}, record=batch, momentum=1)", tmp_path / pooling)
        first = run.server.weights
        run.round(0)
        variances[pooling] = run.server.statistics[VAR]
    within = sum(
        len(x) * x.var(dim=(0, 2, 3), correction=0) for x in (activations(run, first, name) for name in CLIENTS)
    )
    torch.testing.assert_close(variances["mean"], within.float() / 72)
    assert (variances["pooled"] > variances["mean"]).all()


@pytest.mark.parametrize("record", ["mixture", "batch"])
@pytest.mark.parametrize("momentum", [1.0, 0.3])
def test_under_global_statistics_alone_the_raw_moments_are_recorded(tmp_path, momentum, record):
    """The mixture there is the old global statistics: recorded, these would never move."""
    method = f"hbn(mix=global, record={record}, momentum={momentum}, warm_start=false)"
    run = started(method, tmp_path, learning_rate=1e-3)  # nothing of the batch holds large steps back
    mean, var = torch.zeros(6), torch.ones(6)
    for round in range(3):
        sent = run.server.weights
        inputs = torch.cat([second_inputs(run, sent, name, mean, var) for name in CLIENTS])
        before = run.server.statistics
        tested = run.round(round)
        new = union_moments(run, sent)
        mean, var = (torch.lerp(old, n, momentum) for old, n in zip((mean, var), new, strict=True))
        torch.testing.assert_close(run.server.statistics[MEAN], mean)
        torch.testing.assert_close(run.server.statistics[VAR], var)
        second = "encoder.6.running_var"
        expected = (inputs.var(dim=(0, 2, 3), correction=0) * len(inputs) / (len(inputs) - 1)).float()
        torch.testing.assert_close(run.server.statistics[second], torch.lerp(before[second], expected, momentum))
        assert torch.equal(tested.statistics[MEAN], run.server.statistics[MEAN]), "tested as it was trained"
        assert run.traffic["questions"] == 0


def second_inputs(run: Federated, weights: dict[str, Tensor], name: str, mean: Tensor, var: Tensor) -> Tensor:
    """Input of the second batch norm where the first normalises with these statistics."""
    w = {key: tensor.double() for key, tensor in weights.items()}
    x, shape = activations(run, w, name), (1, -1, 1, 1)
    x = (x - mean.double().view(shape)) / (var.double().view(shape) + 1e-5).sqrt()
    x = x * w["encoder.1.weight"].view(shape) + w["encoder.1.bias"].view(shape)
    x = nn.functional.max_pool2d(torch.relu(x), 2)
    return nn.functional.conv2d(x, w["encoder.5.weight"], w["encoder.5.bias"], padding=1)


# -- as released -----------------------------------------------------------------------------------------------
def test_as_released_the_mixture_of_64_samples_counts_as_64(tmp_path):
    labels = [[3, 1, 0, 2, 2] * 20, [1, 0] * 10]
    run = started("hbn(variant=released, momentum=1)", tmp_path, small_federation(labels))
    sent = run.server.weights
    means, variances = [], []
    for name, own in zip(("client0", "client1"), labels, strict=True):
        first = [i for c in range(4) for i, label in enumerate(own) if label == c][:64]
        x = activations(run, sent, name)[first]
        means.append(0.5 * x.mean(dim=(0, 2, 3)))  # the other half is of mean 0 and variance 1
        variances.append(0.5 * x.var(dim=(0, 2, 3), correction=0) + 0.5)
    run.round(0)
    mean = (64 * means[0] + 20 * means[1]) / 84
    spread = [v + (m - mean) ** 2 for m, v in zip(means, variances, strict=True)]
    variance = (64 * spread[0] + 20 * spread[1]) / 83
    for name, new in ((MEAN, mean), (VAR, variance)):
        torch.testing.assert_close(run.server.statistics[name], new.float())


def test_as_released_the_pass_is_augmented(tmp_path):
    federation = dataclasses.replace(small_federation(), train_transform=parse_transforms("crop(padding=3)"))
    moments = {}
    for variant in ("paper", "released"):
        run = started(f"hbn(record=batch, variant={variant})", tmp_path / variant, federation)
        moments[variant] = run.setup.worker.train("client0", broadcast(run), {})[0].statistics[MEAN]
    plain = activations(run, run.server.weights, "client0").mean(dim=(0, 2, 3)).float()
    torch.testing.assert_close(moments["paper"], plain)
    assert (moments["released"] - plain).abs().max() > 1e-3


def test_as_released_a_new_client_starts_from_the_mean_of_the_others_factors(tmp_path):
    """Each keeps its own; the mean is by data size, and over the clients of the last round."""
    arrived: dict[str, Tensor] = {}

    def look(client: LocalClient) -> None:
        arrived[client.name] = client.model.get_parameter(ALPHA).detach().clone()

    run = started([methods.build("hbn(variant=released)"), Probe(start=look)], tmp_path)
    took_part = [["client0", "client1"], ["client0", "client1"], CLIENTS]
    run._sample = lambda round: setattr(run.server, "participants", took_part[round])
    factors: dict[str, Tensor] = {}
    for round in range(3):
        run.round(round)
        for name in took_part[round][:2]:
            assert torch.equal(arrived[name], factors.get(name, torch.zeros(6)))
        if round < 2:
            factors = {name: run.memory.look(name)[f"local/{ALPHA}"].clone() for name in took_part[round]}
            mean = (24 * factors["client0"] + 16 * factors["client1"]) / 40
            torch.testing.assert_close(run.server.extras[f"hbn/{ALPHA}"], mean)
    assert not torch.equal(factors["client0"], factors["client1"])
    torch.testing.assert_close(arrived["client2"], mean)
    assert arrived["client2"].abs().max() > 0


# -- with other models and methods -----------------------------------------------------------------------------


def test_without_batch_norm_there_is_nothing_to_act_on():
    method = Composition([methods.build("hbn")])
    with pytest.raises(MethodError, match="acts on batch norm"):
        method.prepare(small_model(norm=nn.Identity))
    with pytest.raises(MethodError):
        Composition([methods.build("hbn"), methods.build("fedbn")]).prepare(small_model())
