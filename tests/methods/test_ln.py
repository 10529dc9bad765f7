from __future__ import annotations

from torch import nn

from tests import tiny


def test_a_single_group_takes_the_place_of_batch_norm() -> None:
    norm = tiny.setup("ln").worker.model.encoder[1]  # type: ignore[index]
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == 1
