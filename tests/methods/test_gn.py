from __future__ import annotations

import pytest
import torch
from torch import nn

from fedkeel.errors import MethodError
from tests import tiny


@pytest.mark.parametrize(
    ("method", "width", "groups"),
    [("gn", 8, 2), ("gn(groups=4)", 8, 4), ("gn(groups=32)", 64, 32), ("gn(groups=32)", 16, 8)],
)
def test_group_norm_takes_the_place_of_batch_norm(method: str, width: int, groups: int) -> None:
    worker = tiny.setup(method, network=tiny.model(width=width)).worker
    norm = worker.model.encoder[1]  # type: ignore[index]
    assert isinstance(norm, nn.GroupNorm)
    assert (norm.num_groups, norm.num_channels) == (groups, width)
    assert worker.layout.statistics == []


def test_a_sample_is_normalised_by_itself() -> None:
    model = tiny.setup("gn").worker.model.train()
    x = torch.rand(4, 3, 8, 8)
    with torch.no_grad():
        assert torch.allclose(model(x).logits[:1], model(x[:1]).logits, atol=1e-6)


def test_without_batch_norm_there_is_nothing_to_replace() -> None:
    with pytest.raises(
        MethodError, match=r"'gn' acts on batch norm, and there is none to act on \(the model has none\)"
    ):
        tiny.setup("gn", network=tiny.model(norm=False))
