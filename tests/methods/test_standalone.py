from __future__ import annotations

from pathlib import Path

import torch

from tests import tiny
from tests.methods.test_fedbn import personal


def test_nothing_travels(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r", "standalone", rounds=2)
    assert run.summary is not None
    assert (run.summary["bytes_up"], run.summary["bytes_down"]) == (0, 0)


def test_a_client_trains_as_if_it_were_the_only_one(tmp_path: Path) -> None:
    together = tiny.run(tmp_path / "a", "standalone", rounds=3)
    alone = tiny.run(tmp_path / "b", "standalone", rounds=3, on=tiny.federation({"ward": 14}))
    left, right = personal(together, "ward"), personal(alone, "ward")
    assert all(torch.equal(left[name], tensor) for name, tensor in right.items())
    assert not torch.equal(left["head.weight"], personal(together, "clinic")["head.weight"])
