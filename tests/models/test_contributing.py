"""The example of a model of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedkeel
from fedkeel.errors import FedkeelError

EXAMPLE = Path(__file__).parents[2] / "examples" / "add" / "two_blocks.py"


def test_a_model_in_one_file_trains_and_its_options_are_checked(tmp_path: Path) -> None:
    exec(compile(EXAMPLE.read_text(), "two_blocks.py", "exec"), {"__name__": "two_blocks"})
    options = {"rounds": 1, "subsample": 8, "executor": "serial"}
    run = fedkeel.simulate(model="two_blocks(width=4)", directory=tmp_path / "run", **options)
    assert run.model().encoder.feature_dim == 8
    with pytest.raises(FedkeelError, match=r"The 'width' of two_blocks is 0: give at least 1."):
        fedkeel.simulate(model="two_blocks(width=0)", directory=tmp_path / "refused", **options)
