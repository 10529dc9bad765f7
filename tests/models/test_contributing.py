"""The file that CONTRIBUTING shows for a model of one's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedkeel
from fedkeel.errors import FedkeelError

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


def test_a_model_in_one_file_trains_and_its_options_are_checked(tmp_path: Path) -> None:
    section = PAGE.partition("## Add a model in one file")[2].partition("\n## ")[0]
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert code is not None
    exec(compile(code[1], "two_blocks.py", "exec"), {"__name__": "two_blocks"})
    options = {"rounds": 1, "subsample": 8, "executor": "serial"}
    run = fedkeel.simulate(model="two_blocks(width=4)", directory=tmp_path / "run", **options)
    assert run.model().encoder.feature_dim == 8
    with pytest.raises(FedkeelError, match=r"The 'width' of two_blocks is 0: give at least 1."):
        fedkeel.simulate(model="two_blocks(width=0)", directory=tmp_path / "refused", **options)
