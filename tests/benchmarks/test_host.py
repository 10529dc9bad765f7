"""The measurement of the host's time, and what it counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import host

from tests.engine.executors.pretended import pretend


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there is a GPU")
def test_the_host_waits_for_the_card_once_in_a_round_and_replays_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    card = pretend(monkeypatch.setattr)
    monkeypatch.setattr(host, "card", card, raising=False)
    counted = {clients: host.Counting().round(host.Rounds(clients)) for clients in (2, 4)}
    assert {numbers["waits"] for numbers in counted.values()} == {1}
    assert {clients: numbers["graphs"] for clients, numbers in counted.items()} == {2: 2 * 63, 4: 4 * 63}
    each = (counted[4]["operations"] - counted[2]["operations"]) / 2
    assert each < 70  # half of them allocations; each takes the host microseconds
