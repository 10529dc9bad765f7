"""The pretended card captures and replays as a real one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeel.engine.executors.cuda.slot import capture
from tests.engine.executors.pretended import pretend


def test_a_capture_does_nothing_and_a_replay_what_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch.setattr)
    weight, x, total = torch.ones(3, requires_grad=True), torch.arange(3.0), torch.zeros(())
    done: list[int] = []

    def work() -> None:
        done.append(1)
        weight.grad = None
        loss = (weight * x).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            torch._foreach_add_([weight], [weight.grad], alpha=-0.1)  # type: ignore[list-item]
        total.add_(loss.detach())

    graph = capture(0, work)
    assert weight.tolist() == [1, 1, 1]
    assert total.item() == 0
    x.copy_(torch.tensor([0.0, 1.0, 0.0]))  # what lies at the same place is what a replay sees
    graph.replay()
    graph.replay()
    assert done == [1]
    torch.testing.assert_close(weight.detach(), torch.tensor([1.0, 0.64, 1.0]))
    torch.testing.assert_close(total, torch.tensor(1 + 0.8**2))


@pytest.mark.parametrize(
    "ask",
    [Tensor.item, torch.rand_like, lambda t: t[t > 0], torch.nonzero],
    ids=["a number", "a draw", "a mask", "places"],
)
def test_what_asks_the_host_cannot_be_captured(ask: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch.setattr)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        capture(0, lambda: ask(torch.ones(())))  # type: ignore[arg-type]
