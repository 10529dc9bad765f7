"""What the papers' equations and theorems speak of, computed once more without the code that is under test."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedkeel import analysis
from fedkeel.analysis.diagnostic import recorded
from fedkeel.errors import FedkeelError
from tests import tiny
from tests.analysis.by_hand import CONV, NORM, bars_of, images, lines_of, recorded_run

FEDERATION = tiny.federation()
CLIENTS = {client.name: client for client in FEDERATION.clients}


def inputs_of_the_norm(entries: dict[str, Tensor], pixels: Tensor) -> np.ndarray:
    """(values, channels), by a sliding window in NumPy."""
    x = np.pad(pixels.numpy().astype(np.float64) / 255, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))
    kernel, bias = (entries[f"{CONV}.{name}"].double().numpy() for name in ("weight", "bias"))
    return (np.einsum("nchwij,ocij->nhwo", windows, kernel) + bias).reshape(-1, len(bias))


@pytest.mark.parametrize("method", ["fedavg", "hbn"])
def test_statistics_bias_is_the_distance_from_the_moments_of_all_data(tmp_path: Path, method: str) -> None:
    run, seen = recorded_run(tmp_path / "run", "statistics-bias", method)
    every = torch.cat([images(FEDERATION, client.train)[0] for client in CLIENTS.values()])
    document = analysis.run("statistics-bias", run)
    for figure, entry, moment in ((0, "running_mean", np.mean), (2, "running_var", np.var)):
        for round, kept in seen.rounds.items():
            ideal = moment(inputs_of_the_norm(kept.model, every), axis=0)
            expected = np.abs(kept.model[f"{NORM}.{entry}"].double().numpy() - ideal).mean()
            assert lines_of(document, figure)[NORM][round] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    later = tiny.run(tmp_path / "later", method, batch_size=64)
    afterwards = analysis.run("statistics-bias", later, federation=FEDERATION, model=tiny.model())
    assert bars_of(afterwards)["aggregated"][NORM] == pytest.approx(bars_of(document, 1)["aggregated"][NORM])


def test_statistics_that_stay_on_clients_have_no_bias(tmp_path: Path) -> None:
    with pytest.raises(FedkeelError, match="'fedbn' leaves them on its clients: choose 'statistics-divergence'"):
        tiny.run(tmp_path / "run", "fedbn", record="statistics-bias")


def steps_by_hand(name: str, sent: dict[str, Tensor], alpha: float, beta: float) -> tuple[float, float, float]:
    """Eq. 10 in its own loop: the shares of clipped steps and gradients, and the mean length of what clipping took."""
    on = tiny.federation(augment="")
    network, plan = tiny.model().double(), tiny.setup(on=on).worker.plan(name, 0)
    network.load_state_dict(sent)
    network.eval()  # calibrated: under the statistics that were sent
    history: list[float] = []
    steps, gradients, bias = [], [], []
    for first, last in plan.bounds:
        x, y = images(on, plan.order[first:last])
        loss = torch.nn.functional.cross_entropy(network(x.double() / 255).logits, y)
        found = torch.autograd.grad(loss, list(network.parameters()))
        norms = [float(g.norm()) for g in found]
        history = history or [float("inf")] * len(norms)  # the first step is never clipped
        factors = [min(alpha * gamma / norm, 1.0) for gamma, norm in zip(history, norms, strict=True)]
        history = history if bias else norms
        clipped = [g * factor for g, factor in zip(found, factors, strict=True)]
        history = [beta * gamma + (1 - beta) * norm for gamma, norm in zip(history, norms, strict=True)]
        gradients.append(np.mean([factor < 1 for factor in factors]))
        steps.append(any(factor < 1 for factor in factors))
        taken = np.concatenate([(g - c).numpy().ravel() for g, c in zip(found, clipped, strict=True)])
        bias.append(np.linalg.norm(taken))
        with torch.no_grad():
            for parameter, gradient in zip(network.parameters(), clipped, strict=True):
                parameter -= 0.1 * gradient
    return float(np.mean(steps)), float(np.mean(gradients)), float(np.mean(bias))


def test_clipping_is_that_of_equation_10(tmp_path: Path) -> None:
    method = "fedcoda(calibrate_from=0, lambda_fa=0, lambda_pc=0, alpha=0.9, beta=0.5)"
    options: dict[str, Any] = {"momentum": 0.0, "learning_rate": 0.1, "rounds": 1, "batch_size": 4}
    options |= {"on": tiny.federation(augment=""), "weight_decay": 0.0}
    run, seen = recorded_run(tmp_path / "run", "clipping,gradient-norms", method, **options)
    (entry,) = recorded(run.directory, "clipping")
    for name in CLIENTS:
        steps, gradients, bias = steps_by_hand(name, seen.rounds[0].sent, alpha=0.9, beta=0.5)
        assert 0 < gradients < steps < 1
        assert entry.values["steps"][name] == pytest.approx(steps)
        assert entry.values["gradients"][name] == pytest.approx(gradients)
        assert entry.values["bias"][name] == pytest.approx(bias, rel=1e-4)


def test_nothing_is_clipped_before_the_switch(tmp_path: Path) -> None:
    method = "fedcoda(calibrate_from=0.5, alpha=0.5)"
    run, _ = recorded_run(tmp_path / "run", "clipping", method, rounds=4, batch_size=4)
    share = lines_of(analysis.run("clipping", run))["steps"]
    assert [share[round] > 0 for round in range(4)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("method", "why"), [("fedavg", "'fedavg' clips none"), ("scaffold+fedcoda", "'scaffold' changes them otherwise")]
)
def test_what_is_no_clipping_is_refused(tmp_path: Path, method: str, why: str) -> None:
    with pytest.raises(FedkeelError, match=f"looks at clipped gradients, and {why}"):
        tiny.run(tmp_path / "run", method, record="clipping", momentum=0.0)


def objective(network: torch.nn.Module, method: str) -> Tensor:
    """L of Theorem 1, each client's data in one batch."""
    total, count = torch.zeros((), dtype=torch.float64), sum(len(client.train) for client in CLIENTS.values())
    for client in CLIENTS.values():
        x, y = images(FEDERATION, client.train)
        output = network(x.double() / 255)
        loss = -output.logits.log_softmax(1)[range(len(y)), y].mean()
        if method == "univarfl":
            classes, z = 4, output.features / output.features.norm(dim=1, keepdim=True)
            energy = (1 / (1 - z @ z.T + 1e-2)).mean()  # Eq. 3
            variance = torch.eye(classes).var(dim=0)[0] - output.logits.softmax(1).var(dim=0)  # Eqs. 1-2
            loss = loss + 0.5 * energy + classes / 4 * variance.clamp_min(0).mean()
        total = total + loss * len(y) / count
    return total


@pytest.mark.parametrize("method", ["fedavg", "univarfl"])
def test_the_global_gradient_is_that_of_the_objective(tmp_path: Path, method: str) -> None:
    run, seen = recorded_run(tmp_path / "run", "global-gradient", method)
    found = lines_of(analysis.run("global-gradient", run))
    expected = {}
    for round, kept in seen.rounds.items():
        network = copy.deepcopy(tiny.model()).double().train()  # batch statistics
        network.load_state_dict(kept.model)
        gradients = torch.autograd.grad(objective(network, method), list(network.parameters()))
        expected[round] = sum(float(gradient.square().sum()) for gradient in gradients)
    assert found["at the global model"] == pytest.approx(expected, rel=1e-3)
    least = {round: min(expected[earlier] for earlier in range(round + 1)) for round in expected}
    assert found["smallest so far"] == pytest.approx(least, rel=1e-3)


def test_of_a_run_afterwards_it_is_that_of_the_models_it_kept(tmp_path: Path) -> None:
    watched, _ = recorded_run(tmp_path / "watched", "global-gradient")
    plain = tiny.run(tmp_path / "plain", batch_size=64)
    document = analysis.run("global-gradient", plain, federation=FEDERATION, model=tiny.model())
    during = lines_of(analysis.run("global-gradient", watched))["at the global model"]
    after = lines_of(document)["at the global model"]
    assert after == pytest.approx({round: during[round] for round in after})
    assert 2 in after
