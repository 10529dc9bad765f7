from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedkeel import methods
from fedkeel.engine.rounds import Federated
from fedkeel.errors import FedkeelError, MethodError
from fedkeel.method import Composition
from fedkeel.nn import HybridBatchNorm, ScaledWSConv2d, batch_norms, hybrid_norms
from fedkeel.parties import LocalClient
from tests.methods.small import Probe, broadcast, pixels, small_federation, small_model, started

MEAN, VAR, ALPHA = "encoder.1.running_mean", "encoder.1.running_var", "encoder.1.alpha"
CLIENTS = ["client0", "client1", "client2"]


def activations(run: Federated, weights: dict[str, Tensor], name: str) -> Tensor:
    """Input of the first batch norm, by the plain formula, in float64: (samples, channels, height, width)."""
    x = pixels(run.federation, name).double()
    w, b = weights["encoder.0.weight"].double(), weights["encoder.0.bias"].double()
    return nn.functional.conv2d(x, w, b, padding=1)


def union_moments(run: Federated, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance of the activations of all clients' data together; the paper divides by N - 1 samples."""
    everything = torch.cat([activations(run, weights, name) for name in CLIENTS])
    n = len(everything)
    variance = everything.var(dim=(0, 2, 3), correction=0) * n / (n - 1)
    return everything.mean(dim=(0, 2, 3)).float(), variance.float()


@pytest.mark.parametrize("stats_batch", [4, 64])
def test_global_statistics_move_towards_those_of_the_union_of_all_data(tmp_path, stats_batch):
    run = started(f"hbn(record=batch, momentum=0.3, stats_batch={stats_batch})", tmp_path)
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
    run = started("hbn", tmp_path)
    update, _ = run.setup.worker.train("client1", broadcast(run), {})
    x = activations(run, run.server.weights, "client1")  # one batch: half of it, half of mean 0 and variance 1
    torch.testing.assert_close(update.statistics[MEAN], 0.5 * x.mean(dim=(0, 2, 3)).float())
    torch.testing.assert_close(update.statistics[VAR], 0.5 * x.var(dim=(0, 2, 3), correction=0).float() + 0.5)


def test_the_statistics_are_of_the_broadcast_weights_whatever_training_does(tmp_path):
    updates = []
    for rate in (0.01, 0.5):
        run = started("hbn", tmp_path / str(rate), learning_rate=rate)
        updates.append(run.setup.worker.train("client0", broadcast(run), {})[0])
    assert not torch.equal(updates[0].weights["head.weight"], updates[1].weights["head.weight"])
    for name, statistic in updates[0].statistics.items():
        assert torch.equal(statistic, updates[1].statistics[name])


def test_training_normalises_with_the_broadcast_statistics(tmp_path):
    seen = []
    probe = Probe(gradients=lambda client: seen.append(client.model.get_buffer(MEAN).clone()))
    run = started([methods.build("hbn"), probe], tmp_path)
    run.server.statistics[MEAN] = torch.full((6,), 0.25)
    run.round(0)
    assert len(seen) == 9
    assert all(torch.equal(mean, torch.full((6,), 0.25)) for mean in seen)


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
    trained = {name: run.executor.memory.of(name)[f"local/{ALPHA}"].clone() for name in CLIENTS}
    run.round(1)
    for name in CLIENTS:
        assert torch.equal(arrived[name][0], torch.zeros(6))
        assert not torch.equal(trained[name], torch.zeros(6))
        assert torch.equal(arrived[name][1], trained[name])
    assert not torch.equal(trained["client0"], trained["client1"])
    assert torch.equal(trained["client0"], memory[f"local/{ALPHA}"])


def test_the_pass_sees_every_class_that_the_client_has(tmp_path):
    in_order = small_federation([[c for c in range(4) for _ in range(25)]])
    moments = {}
    for variant in ("paper", "released"):
        run = started(f"hbn(record=batch, variant={variant})", tmp_path / variant, in_order)
        moments[variant] = run.setup.worker.train("client0", broadcast(run), {})[0].statistics[MEAN]
        x = activations(run, run.server.weights, "client0").float()
    torch.testing.assert_close(moments["paper"], x.mean(dim=(0, 2, 3)))
    torch.testing.assert_close(moments["released"], x[:64].mean(dim=(0, 2, 3)))
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


def test_a_warm_start_takes_the_first_moments_whole(tmp_path):
    run = started("hbn(warm_start=true)", tmp_path)
    sent = run.server.weights
    run.round(0)
    for name, moment in zip((MEAN, VAR), union_moments(run, sent), strict=True):
        torch.testing.assert_close(run.server.statistics[name], moment)
    before = run.server.statistics[MEAN]
    run.round(1)
    assert 0 < (run.server.statistics[MEAN] - before).abs().max() < 0.02 * before.abs().max()


def test_evaluation_uses_fresh_statistics_of_the_new_weights_on_a_copy(tmp_path):
    run = started("hbn(record=batch)", tmp_path)
    before, sent = run.server.statistics, run.server.weights
    tested = run.round(0)
    for statistics, mean in (
        (tested.statistics, union_moments(run, run.server.weights)[0]),
        (run.server.statistics, 0.99 * before[MEAN] + 0.01 * union_moments(run, sent)[0]),
    ):
        torch.testing.assert_close(statistics[MEAN], mean)
    assert run.traffic.questions == 1


def test_an_answer_of_wrong_shape_is_left_out(tmp_path):
    run = started("hbn(record=batch)", tmp_path)
    ask = run.executor.ask

    def tampered(*arguments):
        for answer in ask(*arguments):
            if answer.client == "client2":
                answer.tensors[MEAN] = torch.zeros(5)
            yield answer

    run.executor.ask = tampered
    tested = run.round(0)
    both = torch.cat([activations(run, run.server.weights, name) for name in CLIENTS[:2]])
    torch.testing.assert_close(tested.statistics[MEAN], both.mean(dim=(0, 2, 3)).float())


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
    assert run.traffic.questions == 0


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


@pytest.mark.parametrize(("mix", "share"), [("global", 1.0), ("batch", 0.0), ("fixed", 0.5)])
def test_the_mixture_can_be_fixed(tmp_path, mix, share):
    run = started(f"hbn(mix={mix})", tmp_path)
    layer = run.setup.worker.model.get_submodule("encoder.1")
    assert torch.equal(layer.share(), torch.full((6,), share))
    run.round(0)
    assert torch.equal(run.executor.memory.of("client0")[f"local/{ALPHA}"], torch.zeros(6))


# -- with other models and methods -----------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedprox+hbn", "fedwon+hbn", "hbn+fedwon", "hbn+fedprox", "hbn(variant=released)"])
def test_it_composes(tmp_path, method):
    run = started(method, tmp_path)
    run.round(0)
    model = run.setup.worker.model
    assert len(hybrid_norms(model)) == 2
    assert not batch_norms(model)
    if "fedwon" in method:
        assert isinstance(model.get_submodule("encoder.0"), ScaledWSConv2d)
    for _, parameter in model.named_parameters():
        assert torch.isfinite(parameter).all()


def test_clients_of_one_sample_and_batches_of_one(tmp_path):
    one = small_federation([[0], [1, 2, 3], [2] * 5])
    model = small_model()
    model.encoder.append(nn.BatchNorm1d(8, affine=False))
    run = started("hbn", tmp_path, one, model, batch_size=1)
    for round in range(2):
        tested = run.round(round)
    assert all(torch.isfinite(tensor).all() for tensor in (tested.weights | tested.statistics).values())


def test_batch_norms_without_statistics_or_affine_parameters_are_replaced_too(tmp_path):
    def norm(channels: int) -> nn.Module:
        return nn.BatchNorm2d(channels, affine=False, track_running_stats=False)

    run = started("hbn(momentum=1)", tmp_path, model=small_model(norm))
    run.round(0)
    assert run.server.statistics[MEAN].abs().sum() > 0


def test_processes_agree_with_serial(tmp_path):
    results = []
    for executor in ("serial", "processes"):
        run = started("hbn", tmp_path / executor, executor=executor, workers=2)
        try:
            for round in range(2):
                tested = run.round(round)
        finally:
            run.executor.close()
        results.append(tested.weights | tested.statistics)
    for name, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][name])


def test_without_batch_norm_there_is_nothing_to_act_on():
    method = Composition([methods.build("hbn")])
    with pytest.raises(MethodError, match="acts on batch norm"):
        method.prepare(small_model(norm=nn.Identity))
    with pytest.raises(MethodError):
        Composition([methods.build("hbn"), methods.build("fedbn")]).prepare(small_model())


@pytest.mark.parametrize(
    "text",
    ["momentum=0", "momentum=1.5", "stats_samples=0", "record=all", "mix=half", "statistics=none", "variant=mine"],
)
def test_wrong_options_are_refused(text):
    with pytest.raises(FedkeelError, match="of hbn is"):
        methods.build(f"hbn({text})")


def test_defaults_are_the_papers():
    assert methods.build("hbn").momentum == 0.01
    assert methods.build("hbn(variant=released)").momentum == 0.002
    model = copy.deepcopy(small_model())
    methods.build("hbn").prepare(model)
    layer = model.get_submodule("encoder.1")
    assert isinstance(layer, HybridBatchNorm)
    assert torch.equal(layer.share(), torch.full((6,), 0.5))
