from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from fedkeel import methods
from fedkeel.core.composition import Composition
from fedkeel.core.messages import Update
from fedkeel.core.method import Method
from fedkeel.core.state import Tensors
from fedkeel.methods.fedgma import agreement_mask
from tests import tiny
from tests.methods.small import broadcast, names, started


def stored(run: object) -> Tensors:
    return safetensors.torch.load_file(run.directory / "model.safetensors")  # type: ignore[attr-defined]


def test_the_mask_is_one_from_the_threshold_on_and_the_agreement_below_it():
    signs = torch.tensor([[1.0, 1, 1, 1, 0], [2.0, 3, 5, -1, 0], [1.0, 1, -9, -1, 0], [7.0, -0.1, -1, -1, 0]])
    assert agreement_mask(signs, 0.5).tolist() == [1, 1, 0, 1, 0]  # agreements 1, 1/2, 0, 1/2, 0
    assert agreement_mask(signs, 0.6).tolist() == [1, 0.5, 0, 0.5, 0]
    assert agreement_mask(signs, 1.0).tolist() == [1, 0.5, 0, 0.5, 0]
    assert agreement_mask(torch.ones(49, 1), 1.0).item() == 1  # 49 times 1/49 is not 1


@pytest.mark.parametrize(("tau", "eta"), [(0.4, 1.0), (1.0, 0.5), (0.0, 1.5)])
def test_the_new_weights_are_those_of_the_formula(tmp_path, tau, eta):
    """By loops over entries in float64, from the updates that the clients really send."""
    run = started(f"fedgma(tau={tau}, server_lr={eta})", tmp_path)
    old = run.server.weights
    updates = [run.setup.worker.train(name, broadcast(run), {})[0] for name in names(run)]
    run.round(0)
    samples = np.array([update.samples for update in updates], dtype=float)
    damped = 0
    for name, new in run.server.weights.items():
        w = old[name].double().numpy().ravel()
        theirs = np.stack([update.weights[name].double().numpy().ravel() for update in updates])
        for i, value in enumerate(new.double().numpy().ravel()):
            agreement = abs(sum(np.sign(theirs[:, i] - w[i]))) / len(updates)
            mask = 1.0 if agreement >= tau else agreement
            damped += mask < 1
            expected = w[i] + eta * mask * (samples @ theirs[:, i] / samples.sum() - w[i])
            assert value == pytest.approx(expected, rel=1e-4, abs=1e-6), name
    assert (damped > 0) == (tau > 1 / 3)  # of three clients at least one third agrees


def test_without_a_threshold_it_is_fedavg(tmp_path: Path) -> None:
    plain, masked = (tiny.run(tmp_path / m, m, rounds=2) for m in ("fedavg", "fedgma(tau=0)"))
    assert tiny.result(plain) == tiny.result(masked)
    assert tiny.result(plain) != tiny.result(tiny.run(tmp_path / "r", "fedgma(tau=1)", rounds=2))


def test_the_mean_of_identical_clients_is_that_client():
    method, worker = methods.build("fedgma(tau=1)"), tiny.setup().worker
    update, _ = worker.train("ward", tiny.broadcast(worker), {})
    server = type("Server", (), {"weights": tiny.broadcast(worker).weights})()
    new = method.weights(server, [update] * 3, update.weights)
    assert all(torch.equal(new[name], tensor) for name, tensor in update.weights.items())


def test_statistics_and_counters_keep_their_own_rule(tmp_path: Path) -> None:
    plain, masked = (stored(tiny.run(tmp_path / m, m, rounds=1)) for m in ("fedavg", "fedgma(tau=1)"))
    for name in plain:
        is_weight = "running" not in name and "num_" not in name
        assert torch.equal(plain[name], masked[name]) is not is_weight, name


def test_it_masks_what_the_part_before_it_made():
    class Doubled(Method):
        name = "doubled"

        def weights(self, server, updates, mean):
            return {name: server.weights[name] + 2 * (t - server.weights[name]) for name, t in mean.items()}

    server = type("Server", (), {"memory": {}, "extras": {}, "weights": {"w": torch.zeros(2)}})()
    server.scoped = lambda _: server
    updates = [
        Update("a", 1, {"w": torch.tensor([1.0, 1.0])}, {}),
        Update("b", 1, {"w": torch.tensor([3.0, -3.0])}, {}),
    ]
    mean = {"w": torch.tensor([2.0, -1.0])}
    both = Composition([Doubled(), methods.build("fedgma")])
    assert both.weights(server, updates, mean)["w"].tolist() == [4.0, 0.0]
