from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedkeel.errors import MethodError
from tests import tiny
from tests.methods import together
from tests.methods.by_hand import SIZES
from tests.methods.small import broadcast, started, trained

STEPS = {"client0": 4, "client1": 2, "client2": 4}  # two epochs in batches of 16


def accumulated(steps: int, momentum: float) -> float:
    """The paper's closed form of a_k."""
    return (steps - momentum * (1 - momentum**steps) / (1 - momentum)) / (1 - momentum)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_changes_are_divided_by_how_far_their_steps_go(tmp_path: Path, momentum: float, weighting: str) -> None:
    run = started("fednova", tmp_path, batch_size=16, local_epochs=2, momentum=momentum, weighting=weighting)
    before = run.server.weights
    updates = {update.client: update for update in trained(run, SIZES, broadcast(run))}
    run.round(0)
    p = {k: n / 72 if weighting == "samples" else 1 / 3 for k, n in SIZES.items()}
    a = {k: accumulated(steps, momentum) for k, steps in STEPS.items()}
    for k, update in updates.items():
        assert float(update.extras["fednova/a"]) == pytest.approx(a[k], rel=1e-5)
    effective = sum(p[k] * a[k] for k in SIZES)
    for name, w in before.items():
        step = sum(p[k] * (w.double() - updates[k].weights[name].double()) / a[k] for k in SIZES)
        wanted = w.double() - effective * step
        torch.testing.assert_close(run.server.weights[name].double(), wanted, rtol=1e-4, atol=1e-6, msg=name)


def test_where_all_take_as_many_steps_it_is_fedavg(tmp_path: Path) -> None:
    runs = [started(text, tmp_path / text, batch_size=64, local_epochs=2) for text in ("fedavg", "fednova")]
    for run in runs:
        for round in range(2):
            run.round(round)
    together.assert_close(runs[1].server.weights, runs[0].server.weights, atol=1e-5)
    together.assert_close(runs[1].server.statistics, runs[0].server.statistics, atol=1e-5)


def test_steps_of_another_optimiser_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MethodError, match="'fednova' takes steps of SGD, and the optimiser is 'adamw'"):
        tiny.run(tmp_path / "r", "fednova", optimizer="adamw")
