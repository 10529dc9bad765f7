from __future__ import annotations

from tests import tiny


def test_statistics_stay_and_scale_and_shift_travel() -> None:
    layout = tiny.setup("silobn").worker.layout
    assert sorted(layout.local) == [f"encoder.1.{n}" for n in ("num_batches_tracked", "running_mean", "running_var")]
    assert {"encoder.1.weight", "encoder.1.bias"} <= set(layout.weights)
    assert layout.statistics == []
