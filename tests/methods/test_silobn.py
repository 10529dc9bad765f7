from __future__ import annotations

from pathlib import Path

from tests import tiny
from tests.methods.test_fedbn import personal


def test_statistics_stay_and_scale_and_shift_travel() -> None:
    layout = tiny.setup("silobn").worker.layout
    assert sorted(layout.local) == [f"encoder.1.{n}" for n in ("num_batches_tracked", "running_mean", "running_var")]
    assert {"encoder.1.weight", "encoder.1.bias"} <= set(layout.weights)
    assert layout.statistics == []


def test_each_client_keeps_its_own_statistics(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r", "silobn", rounds=2)
    kept = [personal(run, client)["encoder.1.running_mean"] for client in ("ward", "clinic")]
    assert (kept[0] != kept[1]).any()
