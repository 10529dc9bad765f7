"""Two branches as one batch give what two passes give, on the networks here."""

from __future__ import annotations

import pytest
import torch

from fedkeel import models
from fedkeel.nn import batch_norms
from fedkeel.nn.paired_batch_norm import at_once, can_pair, naive


@pytest.mark.parametrize("name", ["resnet10(stem=small)", "small_cnn", "mlp"])
def test_a_pair_is_two_passes_and_leaves_nothing_behind(name: str) -> None:
    torch.manual_seed(0)
    model = models.build_spec(name, num_classes=3, image_size=32).double()
    x, norms = torch.randn(4, 3, 32, 32, dtype=torch.float64), batch_norms(model)
    assert can_pair(model, x)
    statistics = {entry: torch.rand_like(t) + 0.5 for entry, t in model.state_dict().items() if "running" in entry}
    for one, two in zip(at_once(model, norms, statistics, x), naive(model, norms, statistics, x), strict=True):
        torch.testing.assert_close(one.logits, two.logits, rtol=1e-6, atol=1e-6)
    assert not any("forward" in vars(module) for module in model.modules())
