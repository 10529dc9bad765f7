from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedkeel.engine.tasks import fetched
from fedkeel.errors import FedkeelError, MethodError
from tests import tiny
from tests.methods.by_hand import FULL, SIZES, assert_near, initial, mean, trained
from tests.methods.small import started

ALPHA = 0.3


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_three_rounds_are_those_of_the_paper(tmp_path: Path, weighting: str) -> None:
    run = started(f"feddyn(alpha={ALPHA})", tmp_path, local_epochs=3, weighting=weighting, **FULL)
    w = initial()
    zeros = {name: torch.zeros_like(t) for name, t in w.items()}
    g, h, m = dict.fromkeys(SIZES, zeros), zeros, len(SIZES)
    shares = {k: n / 72 if weighting == "samples" else 1 / m for k, n in SIZES.items()}
    for round in range(3):
        ends = {}
        for k in SIZES:

            def changed(now, g_k=g[k], sent=w):
                inner = sum((g_k[name] * now[name]).sum() for name in sent)
                return near(now, sent) - inner

            ends[k] = trained(k, w, 3, changed)
        g = {k: {name: g[k][name] - ALPHA * (ends[k][name] - w[name]) for name in w} for k in SIZES}
        h = {name: h[name] - ALPHA * sum(shares[k] * (ends[k][name] - w[name]) for k in SIZES) for name in w}
        average = mean(list(ends.values()), list(shares.values()))
        w = {name: average[name] - h[name] / ALPHA for name in w}
        run.round(round)
        assert_near(run.server.weights, w)


def test_of_clients_that_did_not_come_the_sum_has_nothing(tmp_path: Path) -> None:
    """h is over all m clients: two of three move it by two thirds of the mean change."""
    run = started(f"feddyn(alpha={ALPHA})", tmp_path, participation=0.67, weighting="uniform", **FULL)
    before = run.server.weights
    run.round(0)
    assert len(run.server.participants) == 2
    start = initial()
    average = mean([trained(k, start, 1, lambda now: near(now, start)) for k in run.server.participants], [1, 1])
    for name, old in before.items():
        change = average[name] - old.double()
        expected = average[name] + 2 / 3 * change
        torch.testing.assert_close(run.server.weights[name].double(), expected, rtol=1e-3, atol=2e-5, msg=name)


def near(now, sent):
    return ALPHA / 2 * sum((now[name] - sent[name]).square().sum() for name in sent)


def test_statistics_are_averaged_and_the_gradients_stay_on_the_clients(tmp_path: Path) -> None:
    runs = [started(text, tmp_path / text) for text in ("fedavg", "feddyn")]
    for run in runs:
        run.round(0)
    assert runs[1].server.extras == {}
    for name, tensor in runs[0].server.statistics.items():
        torch.testing.assert_close(runs[1].server.statistics[name], tensor, rtol=1e-2, atol=1e-3, msg=name)
    assert fetched(runs[1].memory.look("client0"))


def test_what_it_cannot_do_is_refused() -> None:
    with pytest.raises(MethodError, match="'feddyn' needs clients that remember"):
        tiny.setup("feddyn", stateless=True)
    with pytest.raises(FedkeelError, match="'feddyn' does not go by that alone"):
        tiny.setup("feddyn", dp="central", dp_noise=1.0, dp_clip=1.0, weighting="uniform")
