from __future__ import annotations

import pytest
from torch import nn

from fedkeel.errors import MethodError
from tests import tiny


def test_a_single_group_takes_the_place_of_batch_norm() -> None:
    norm = tiny.setup("ln").worker.model.encoder[1]  # type: ignore[index]
    assert isinstance(norm, nn.GroupNorm)
    assert norm.num_groups == 1


def test_without_batch_norm_there_is_nothing_to_replace() -> None:
    with pytest.raises(MethodError, match="'ln' acts on batch norm"):
        tiny.setup("ln", network=tiny.model(norm=False))
