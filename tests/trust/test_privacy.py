from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import logsumexp

from fedkeel.cli import main
from fedkeel.config import Config
from fedkeel.core.client import Batch
from fedkeel.core.messages import Broadcast, Update
from fedkeel.engine.local import Worker
from fedkeel.errors import FedkeelError
from fedkeel.experiments.tables import Results
from fedkeel.runs.run import Run
from fedkeel.runs.summary import SOURCES
from fedkeel.seeds import Stream
from fedkeel.trust import privacy
from fedkeel.trust.privacy import (
    NoisyGradients,
    PoissonSampler,
    choose_rules,
    epsilon,
    noisy_backward,
    noisy_mean,
    sample_gradients,
)
from fedkeel.trust.rules import PlainGradients
from tests import tiny
from tests.deploy.loop import over_network

needs_opacus = pytest.mark.skipif(importlib.util.find_spec("opacus") is None, reason="opacus is not installed")
NOBODY = Batch(torch.zeros(0, 3, 8, 8), torch.zeros(0, dtype=torch.int64))
CENTRAL: dict[str, Any] = {"dp": "central", "weighting": "uniform"}
EIGHT = {f"site{i}": 8 for i in range(8)}


# -- the account --
def renyi_epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    """By summing up the Renyi divergence of (1-q) N(0, s^2) + q N(1, s^2) from N(0, s^2) on a fine grid, order by order
    (Mironov et al. 2019, Section 3.3), and turning the best order into epsilon (Balle et al. 2020, Theorem 21)."""
    z = np.arange(-20 * noise, 20 * noise + 60, 1e-3)
    density = -(z**2) / (2 * noise**2) - math.log(noise * math.sqrt(2 * math.pi))
    with np.errstate(divide="ignore"):
        ratio = np.logaddexp(np.log(1 - rate), np.log(rate) + (2 * z - 1) / (2 * noise**2))
    found = []
    for order in [1 + x / 10 for x in range(1, 100)] + list(range(12, 50)):
        divergence = (logsumexp(density + order * ratio) + math.log(1e-3)) / (order - 1)
        found.append(
            steps * divergence + math.log((order - 1) / order) - (math.log(delta) + math.log(order)) / (order - 1)
        )
    return min(found)


@needs_opacus
@pytest.mark.parametrize("rate", [1.0, 0.4, 0.003])
def test_next_to_no_noise_is_an_epsilon_beyond_all_use_and_not_a_wait_without_end(rate: float) -> None:
    few = [epsilon(noise, rate, 30, 1e-5) for noise in (1e-2, 1e-4, 1e-9, 1e-160, 1e-300, 5e-324)]
    assert few == sorted(few)
    assert few[0] > 1e5
    assert all(math.isfinite(spent) for spent in few)
    assert epsilon(1e300, rate, 30, 1e-5) < 0.2


@pytest.mark.slow
@needs_opacus
@pytest.mark.parametrize(("noise", "rate", "steps"), [(1.0, 0.1, 100), (2.0, 1.0, 30)])
def test_epsilon_is_that_of_a_direct_integration(noise: float, rate: float, steps: int) -> None:
    assert epsilon(noise, rate, steps, 1e-5) == pytest.approx(renyi_epsilon(noise, rate, steps, 1e-5), rel=1e-3)


@needs_opacus
def test_what_is_spent_counts_rounds_or_local_steps() -> None:
    central = Config(**CENTRAL, participation=0.25, dp_noise=1.5)
    assert privacy.spent(central, 7, [10, 20]) == epsilon(1.5, 0.25, 7, 1e-5)
    local = Config(dp="local", batch_size=4, local_epochs=2, dp_noise=1.5)
    # 10 samples: 3 batches of 4 in an epoch, 6 steps a round; of 40 samples one is drawn less often
    assert privacy.spent(local, 5, [10, 40]) == epsilon(1.5, 0.4, 30, 1e-5)
    assert privacy.spent(local, 5, [2]) == epsilon(1.5, 1.0, 10, 1e-5)
    assert privacy.spent(Config(), 5, [10]) is None


# -- central --
def test_the_noisy_mean_is_of_clipped_changes_over_the_expected_number_of_clients() -> None:
    config = Config(**CENTRAL, participation=0.5, dp_clip=2.0, dp_noise=1e-9)
    origin = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([[5.0]])}
    changes = [([0.3, 0.0], 0.4), ([30.0, 0.0], -40.0)]  # of lengths 0.5, as it is, and 50, cut to 2
    updates = [
        Update("x", 1, {"a": origin["a"] + torch.tensor(a), "b": origin["b"] + torch.tensor(b)}, {}) for a, b in changes
    ]
    mean = noisy_mean(config, origin, updates, 8, Stream(b"any"))
    np.testing.assert_allclose(mean["a"].numpy(), [1 + (0.3 + 1.2) / 4, 1.0], rtol=1e-6)
    np.testing.assert_allclose(mean["b"].numpy(), [[5 + (0.4 - 1.6) / 4]], rtol=1e-6)


@pytest.mark.parametrize("updates", [0, 3])
def test_the_noise_is_a_gaussian_of_the_declared_width_whoever_came(updates: int) -> None:
    config = Config(**CENTRAL, participation=0.5, dp_clip=2.0, dp_noise=3.0)
    origin = {"w": torch.zeros(200, 200)}
    mean = noisy_mean(config, origin, [Update("x", 1, origin, {})] * updates, 20, Stream(b"any"))["w"]
    assert float(mean.std()) == pytest.approx(3.0 * 2.0 / 10, rel=0.02)
    assert abs(float(mean.mean())) < 0.01
    again = noisy_mean(config, origin, [], 20, Stream(b"other"))["w"]
    assert abs(float(np.corrcoef(mean.flatten().numpy(), again.flatten().numpy())[0, 1])) < 0.02


def test_clients_take_part_independently_of_each_other() -> None:
    config = Config(**CENTRAL, participation=0.3)
    counts = [len(PoissonSampler(config).sample(20, round)) for round in range(500)]
    assert np.mean(counts) == pytest.approx(6, abs=0.4)
    assert np.var(counts) == pytest.approx(20 * 0.3 * 0.7, rel=0.25)  # binomial, not constant
    assert PoissonSampler(config.replace(participation=1.0)).sample(20, 3) == list(range(20))


@pytest.mark.slow
@needs_opacus
def test_a_central_run_reports_epsilon_and_trains_through_rounds_without_anyone(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r", on=tiny.federation(EIGHT), **CENTRAL, participation=0.15, rounds=8, dp_noise=0.8)
    reported = [record["epsilon"] for record in run.records("round")]
    assert reported == [epsilon(0.8, 0.15, rounds, 1e-5) for rounds in range(1, 9)]
    assert 0 in [record["clients"] for record in run.records("round")]
    assert run.summary is not None
    assert (run.summary["epsilon"], run.summary["delta"]) == (reported[-1], 1e-5)


@needs_opacus
def test_a_client_beyond_the_clip_cannot_move_the_model_further_than_its_share(tmp_path: Path) -> None:
    """With hardly any noise, eight clients that all go far move the model by no more than the clip."""
    before = tiny.model().state_dict()
    run = tiny.run(
        tmp_path / "r", on=tiny.federation(EIGHT), **CENTRAL, rounds=1, dp_noise=1e-6, dp_clip=0.01, learning_rate=1.0
    )
    import safetensors.torch

    after = safetensors.torch.load_file(run.directory / "model.safetensors")
    weights = [name for name, _ in tiny.model().named_parameters()]
    moved = math.sqrt(sum(float((after[name] - before[name]).double().square().sum()) for name in weights))
    assert 0 < moved <= 0.01 * (1 + 1e-5)


# -- local --
PRIVATE = ["gn", "ln", "fedwon", "fedfn", "freeze+gn"]


@needs_opacus
@pytest.mark.parametrize("method", PRIVATE)
def test_gradients_of_single_samples_are_those_of_a_loop(method: str) -> None:
    model = tiny.setup(method, dp="local").worker.model.train()
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(5, 3, 8, 8, generator=generator), torch.tensor([0, 1, 2, 3, 0])
    gradients, losses = sample_gradients(model, x, y)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert gradients.keys() == trained.keys()
    for i in range(5):
        loss = F.cross_entropy(model(x[i : i + 1]).logits, y[i : i + 1])
        torch.testing.assert_close(losses[i], loss.detach(), rtol=1e-4, atol=1e-6)
        alone = torch.autograd.grad(loss, list(trained.values()))
        for name, expected in zip(trained, alone, strict=True):
            torch.testing.assert_close(gradients[name][i], expected, rtol=1e-3, atol=1e-5)


def test_the_step_is_along_clipped_gradients_over_the_expected_batch() -> None:
    model = tiny.model(norm=False)
    x, y = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2])
    clip, config = 0.5, Config(dp="local", batch_size=8, dp_clip=0.5, dp_noise=1e-9)
    noisy_backward(config, Stream(b"any"), model, Batch(x, y))
    expected = {name: np.zeros(p.shape) for name, p in model.named_parameters()}
    clipped = 0
    for i in range(3):
        loss = F.cross_entropy(model(x[i : i + 1]).logits, y[i : i + 1])
        alone = [g.double().numpy() for g in torch.autograd.grad(loss, list(model.parameters()))]
        norm = math.sqrt(sum(float((g**2).sum()) for g in alone))
        clipped += norm > clip
        for name, g in zip(expected, alone, strict=True):
            expected[name] += g * min(1, clip / norm) / 8
    assert clipped
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        np.testing.assert_allclose(parameter.grad.numpy(), expected[name], rtol=1e-3, atol=1e-6)


def test_an_empty_batch_is_noise_of_the_declared_width() -> None:
    model = tiny.model(norm=False, width=64)
    config = Config(dp="local", batch_size=4, dp_clip=0.5, dp_noise=3.0)
    noisy_backward(config, Stream(b"any"), model, NOBODY)
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert float(gradients.std()) == pytest.approx(3.0 * 0.5 / 4, rel=0.05)


def test_each_sample_is_in_a_batch_independently_of_the_others() -> None:
    rule = NoisyGradients(Config(dp="local", batch_size=4, local_epochs=160))
    rule.begin("ward", 0)
    order, sizes, uniforms = rule.batches("ward", 0, 20, 3)
    assert len(sizes) == 800
    assert uniforms.shape == (sum(sizes), 3)
    assert np.mean(sizes) == pytest.approx(4, abs=0.3)
    assert np.var(sizes) == pytest.approx(20 * 0.2 * 0.8, rel=0.2)
    for step in torch.split(order, sizes):
        assert len(set(step.tolist())) == len(step)


@pytest.mark.slow
@needs_opacus
@pytest.mark.parametrize("method", ["gn", "fedwon", "fedavgm+ln"])
def test_a_local_run_trains_reports_epsilon_and_tells_no_loss(tmp_path: Path, method: str) -> None:
    run = tiny.run(tmp_path / "r", method, dp="local", dp_noise=0.7, rounds=2)
    assert [r["epsilon"] for r in run.records("round")] == [
        privacy.spent(run.config, rounds, list(tiny.SIZES.values())) for rounds in (1, 2)
    ]
    assert [r["loss"] for r in run.records("round")] == [None, None]
    assert not any("loss" in record for record in run.records("client"))


@pytest.mark.slow
@needs_opacus
@pytest.mark.parametrize("options", [{**CENTRAL, "participation": 0.7}, {"dp": "local", "method": "gn"}])
def test_a_private_run_is_the_same_under_other_executors_and_after_a_stop(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    class Interruption(Exception):
        pass

    def stop(round: int) -> None:
        if round == 1:
            raise Interruption

    options = {"method": "fedavg", **options, "rounds": 4}
    whole = tiny.run(tmp_path / "whole", **options)
    assert tiny.result(tiny.run(tmp_path / "cores", executor="processes", workers=2, **options)) == tiny.result(whole)
    with pytest.raises(Interruption):
        tiny.run(tmp_path / "stopped", observer=tiny.Notes(stop), **options)
    assert tiny.result(tiny.resume(tmp_path / "stopped")) == tiny.result(whole)


# -- whose randomness it is --
def test_a_stream_is_normal_and_uniform_and_the_same_for_the_same_key() -> None:
    z, u = Stream(b"key").normal(300, 1001), Stream(b"key").uniform(300, 1001)
    assert z.shape == u.shape == (300, 1001)
    assert z.dtype == u.dtype == torch.float32
    assert float(z.mean()) == pytest.approx(0, abs=0.01)
    assert float(z.double().var()) == pytest.approx(1, abs=0.02)
    assert float(z.double().pow(4).mean()) == pytest.approx(3, abs=0.1)
    assert float(z.abs().max()) > 4
    assert 0 <= float(u.min()) < 1e-4
    assert 1 - 1e-4 < float(u.max()) < 1
    assert float(u.double().var()) == pytest.approx(1 / 12, abs=0.002)
    assert torch.equal(z, Stream(b"key").normal(300, 1001))
    assert not torch.equal(z, Stream(b"kez").normal(300, 1001))
    stream = Stream(b"key")
    assert not torch.equal(stream.normal(50), stream.normal(50))
    assert Stream(b"key").normal().shape == ()
    assert Stream(b"key").uniform(0, 3).shape == (0, 3)


def test_it_has_more_beginnings_than_can_be_tried() -> None:
    """A generator of torch on the CPU begins with 32 bits of its seed, whatever it is given."""

    def of_torch(seed: int) -> torch.Tensor:
        return torch.randn(20, generator=torch.Generator().manual_seed(seed))

    assert torch.equal(of_torch(7), of_torch(7 + 2**40))
    keys = [n.to_bytes(32, "little") for n in (7, 7 + 2**32, 7 + 2**40, 7 + 2**200)]
    drawn = {tuple(Stream(key).normal(20).tolist()) for key in keys}
    assert len(drawn) == len(keys)


@pytest.mark.parametrize("secret", [False, True])
def test_noise_and_who_takes_part_follow_from_the_seed_or_from_nothing(secret: bool) -> None:
    """Over a network everybody is told the seed: the same step done twice has other noise, and so counts twice."""
    central, local = Config(**CENTRAL, participation=0.5), Config(dp="local", batch_size=4)
    broadcast, origin = Broadcast(0, 1, {"w": torch.zeros(50)}, {}), tiny.setup("gn").worker

    def drawn() -> list[torch.Tensor]:
        rules, gradients = choose_rules(central, secret=secret), choose_rules(local, secret=secret).gradients
        gradients.begin("ward", 0)
        backward = gradients.backward(lambda: torch.zeros(()), origin.model, NOBODY, origin.task_loss)
        assert float(backward) == 0
        server = SimpleNamespace(round=0, num_clients=4, statistics={})
        return [
            rules.aggregator.mean(server, broadcast, [])[0]["w"],  # type: ignore[arg-type]
            torch.tensor([client in rules.sampler.sample(100, 0) for client in range(100)]),
            gradients.batches("ward", 0, 100, 0)[0],
            torch.cat([p.grad.flatten() for p in origin.model.parameters() if p.grad is not None]),
        ]

    for first, second in zip(drawn(), drawn(), strict=True):
        assert (first.shape == second.shape and torch.equal(first, second)) == (not secret)


def test_a_local_step_is_private_by_its_configuration_alone() -> None:
    """Nobody who makes a worker can forget to say so."""
    given = tiny.setup("gn").worker
    worker = Worker(given.config.replace(dp="local"), given.federation, given.method, given.model, given.device)
    assert isinstance(worker.gradients, NoisyGradients)
    assert type(given.gradients) is PlainGradients


def test_samples_whose_gradients_overflow_do_not_show() -> None:
    """A server may send weights under which only some images do so."""
    model = tiny.model(norm=False)
    with torch.no_grad():
        model.head.weight.fill_(3e38)  # type: ignore[operator, union-attr]
    x = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    config = Config(dp="local", batch_size=4, dp_noise=1.0, dp_clip=0.5)
    noisy_backward(config, Stream(b"any"), model, Batch(x * 1e30, torch.tensor([0, 1, 2])))
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert bool(torch.isfinite(gradients).all())
    assert float(gradients.norm()) < 0.5 * (3 + 2 * len(gradients) ** 0.5)


@pytest.mark.slow
@needs_opacus
def test_a_server_s_noise_is_its_own_and_a_run_says_what_epsilon_rests_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every site is told the seed of the run."""
    simulated = tiny.run(tmp_path / "one", "gn", **CENTRAL, rounds=2)
    network = over_network(tmp_path / "net", "gn", **CENTRAL, rounds=2)
    assert tiny.result(network)["model.safetensors"] != tiny.result(simulated)["model.safetensors"]
    plain = tiny.run(tmp_path / "plain", rounds=1)
    for run, source in ((simulated, "seed"), (network, "system")):
        assert run.summary is not None
        assert run.summary["randomness"] == run.records("round")[-1]["randomness"] == source
        assert main(["show", str(run.directory)]) == 0
        assert SOURCES[source] in " ".join(capsys.readouterr().out.split())
        assert SOURCES[source] in Results.of([("gn", 0, run.summary)]).caption
    assert plain.summary is not None
    assert "randomness" not in plain.summary
    assert "noise" not in Results.of([("fedavg", 0, plain.summary)]).caption


@pytest.mark.slow
@needs_opacus
def test_a_server_that_is_started_again_counts_the_round_that_it_may_have_done_twice(tmp_path: Path) -> None:
    """Its noise was another one then, and the sites have seen it."""

    class Interruption(Exception):
        pass

    def stop(_: int) -> None:
        raise Interruption

    with pytest.raises(Interruption):
        over_network(tmp_path, "gn", observer=tiny.Notes(stop), **CENTRAL, rounds=2)
    run = over_network(tmp_path, "gn", **CENTRAL, rounds=2)
    assert [record["epsilon"] for record in run.records("round")] == [epsilon(1.0, 1.0, n, 1e-5) for n in (1, 3)]


# -- what does not go together --
@needs_opacus
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dp": "local"}, "'dp=local' needs gradients of single samples, and batch norm mixes those of a batch"),
        ({"dp": "local", "method": "fedprox+gn"}, "'fedprox' computes or sends something else from the samples"),
        ({"dp": "local", "method": "fedcoda"}, "'fedcoda' computes or sends something else"),
        ({"dp": "local", "method": "hbn"}, "'hbn' computes or sends something else"),
        ({"dp": "central"}, "equal clients, however many came: give '--weighting uniform'"),
        ({**CENTRAL, "robust": "median"}, "leave out 'robust' and 'min_clients'"),
        ({**CENTRAL, "min_clients": 2}, "leave out 'robust' and 'min_clients'"),
        ({**CENTRAL, "method": "central"}, "'central' does not go by that alone"),
        ({**CENTRAL, "method": "standalone"}, "'dp' is of what clients send, and with 'standalone' nothing travels"),
        ({**CENTRAL, "method": "fedgma"}, "'fedgma' does not go by that alone"),
        ({**CENTRAL, "method": "ga"}, "'ga' does not go by that alone"),
        ({"dp": "centrel"}, "'dp' is 'centrel': did you mean 'central'?"),
        ({"dp": "local", "dp_noise": 0}, "'dp_noise' is 0: give a number above 0"),
    ],
)
def test_what_cannot_be_private_is_refused_in_one_sentence(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(FedkeelError) as caught:
        tiny.setup(**options)
    assert reason in str(caught.value)


def test_without_opacus_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus", None)
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(FedkeelError, match=r"is not installed: 'pip install fedkeel\[privacy\]'"):
        tiny.setup(**CENTRAL)


@needs_opacus
@pytest.mark.parametrize(("method", "told"), [("fedavg", True), ("gn", False), ("fedcoda", True)])
def test_what_is_shared_without_noise_is_told(method: str, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="fedkeel")
    import logging

    logging.getLogger("fedkeel").propagate = True
    tiny.setup(method, **CENTRAL)
    assert ("statistics and what methods send beside get no noise" in caplog.text) == told


@needs_opacus
def test_tables_have_a_column_for_epsilon_where_a_run_has_one(tmp_path: Path) -> None:
    private, plain = (tiny.run(tmp_path / name, rounds=1, **o) for name, o in (("a", CENTRAL), ("b", {})))
    assert private.summary is not None
    assert plain.summary is not None
    both = Results.of([("fedavg@dp=central", 0, private.summary), ("fedavg", 0, plain.summary)])
    assert both.headings[-1] == "epsilon"
    assert [both.traffic(row)[-1] for row in both.rows] == [f"{private.summary['epsilon']:.3g}", ""]
    header, first, second = both.csv().splitlines()
    assert header.endswith(",epsilon")
    assert float(first.rpartition(",")[2]) == private.summary["epsilon"]
    assert second.endswith(",")
    assert "epsilon" not in Results.of([("fedavg", 0, plain.summary)]).headings


@needs_opacus
def test_the_result_tells_epsilon(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run: Run = tiny.run(tmp_path / "r", **CENTRAL, rounds=2)
    assert main(["show", str(run.directory)]) == 0
    assert run.summary is not None
    assert f"privacy epsilon {run.summary['epsilon']:.3g} at delta 1e-05, central" in capsys.readouterr().out
