from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedkeel.core.messages import Missing
from fedkeel.runs.timing import read_timing, seconds_of
from tests import tiny
from tests.engine.test_local import Spoils

METHODS = ["fedavg", "fedprox(mu=0.1)", "fedbn", "silobn", "gn", "ln", "standalone", "central"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_same_seed_gives_the_same_bits(tmp_path: Path, method: str) -> None:
    on = tiny.federation(unseen=4)
    first, second = (tiny.run(tmp_path / name, method, on=on, rounds=2) for name in ("a", "b"))
    assert tiny.result(first) == tiny.result(second)


def test_another_seed_gives_another_run(tmp_path: Path) -> None:
    first, second = (tiny.run(tmp_path / str(seed), seed=seed, rounds=1) for seed in (0, 1))
    assert tiny.result(first) != tiny.result(second)


def test_the_models_and_federations_given_stay_as_they_are(tmp_path: Path) -> None:
    network = tiny.model()
    first, second = (tiny.run(tmp_path / name, "fedbn", network=network, rounds=2) for name in ("a", "b"))
    assert tiny.result(first) == tiny.result(second)
    assert all(torch.equal(p, q) for p, q in zip(network.parameters(), tiny.model().parameters(), strict=True))


def test_of_each_client_that_trained_there_are_seconds(tmp_path: Path) -> None:
    for line in read_timing(tiny.run(tmp_path / "r", rounds=2).directory):
        assert line["clients"].keys() == tiny.SIZES.keys()
        assert all(seconds > 0 for seconds in line["clients"].values())
        assert seconds_of(line) == pytest.approx(line["train"] + line["aggregate"] + line["evaluate"])


def test_results_come_in_the_order_asked_for_with_failures_in_their_place() -> None:
    setup = tiny.setup(Spoils({"clinic"}))
    executor = setup.executor()
    results = list(executor.map(tiny.training("hospital", "clinic", "ward"), tiny.broadcast(setup.worker)))
    assert [isinstance(r, Missing) for r in results] == [False, True, False]
    assert [r.client for r in results] == ["hospital", "clinic", "ward"]
