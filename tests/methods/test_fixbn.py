from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedkeel import methods
from fedkeel.core import state
from fedkeel.core.client import LocalClient
from tests.methods.small import Probe, broadcast, pixels, started


def identical(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "rounds", "first"),
    [("", 4, 2), ("", 5, 2), ("freeze_from=0.29", 4, 1), ("freeze_from=0", 3, 0), ("freeze_from=1", 3, 3)],
)
def test_statistics_change_before_its_round_and_are_bit_identical_from_it_on(tmp_path, options, rounds, first):
    run = started(f"fixbn({options})", tmp_path, rounds=rounds)
    changed = []
    for round in range(rounds):
        before, weights = run.server.statistics, run.server.weights
        run.round(round)
        changed.append(not identical(before, run.server.statistics))
        assert not torch.equal(weights["encoder.1.weight"], run.server.weights["encoder.1.weight"])
    assert changed == [round < first for round in range(rounds)]


@pytest.mark.parametrize(
    ("share", "rounds", "first"), [(0.5, 100, 50), (0.5, 101, 50), (0.29, 100, 29), (0.07, 100, 7)]
)
def test_the_round_is_not_missed_by_rounding(share, rounds, first):
    method = methods.build("fixbn", freeze_from=share)
    assert next(round for round in range(rounds) if method.freezes(round, rounds)) == first


def test_the_first_stage_is_fedavg(tmp_path):
    own, plain = started("fixbn", tmp_path / "a"), started("fedavg", tmp_path / "b")
    for round in range(2):
        own.round(round)
        plain.round(round)
    assert identical(own.server.weights, plain.server.weights)
    assert identical(own.server.statistics, plain.server.statistics)
    own.round(2)
    plain.round(2)
    assert not identical(own.server.weights, plain.server.weights)


@pytest.mark.parametrize("round", [1, 2])
def test_the_second_stage_trains_under_the_frozen_statistics_and_clients_leave_them_alone(tmp_path, round):
    run = started("fixbn", tmp_path, batch_size=64)
    for earlier in range(round):
        run.round(earlier)
    update, _ = run.setup.worker.train("client0", broadcast(run, round), {})
    model = copy.deepcopy(run.setup.worker.model).train(round < 2)
    state.load(model, run.server.weights, run.server.statistics)
    x, y = pixels(run.setup.federation, "client0"), run.setup.federation.labels[run.setup.federation["client0"].train]
    assert update.metrics["loss"] == pytest.approx(F.cross_entropy(model(x).logits, y).item(), rel=1e-4)
    assert identical(update.statistics, run.server.statistics) is (round == 2)


def test_gradients_are_clipped_from_the_freezing_on_and_not_before(tmp_path):
    norms: dict[int, list[float]] = {}

    def record(client: LocalClient) -> None:
        gradients = [p.grad for p in client.model.parameters() if p.grad is not None]
        norms.setdefault(client.round, []).append(nn.utils.get_total_norm(gradients).item())

    parts = [methods.build("fixbn(clip_norm=0.01)"), Probe(gradients=record)]
    run = started(parts, tmp_path, rounds=2)
    run.round(0)
    run.round(1)
    assert min(norms[0]) > 0.01
    assert max(norms[1]) <= 0.01 * 1.001
