"""What the operating system says, as one sentence; and what it must not hide."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedkeel.durable import explained
from fedkeel.errors import StoreError


def full_disk() -> None:
    with explained(Path("here")):
        raise OSError(28, "No space left")


def interrupted() -> None:
    with explained(Path("here")):
        try:
            raise KeyboardInterrupt
        finally:
            raise OSError(9, "Bad file descriptor")


def test_an_error_of_the_system_is_one_sentence() -> None:
    with pytest.raises(StoreError, match="'here' cannot be written: No space left; make room"):
        full_disk()


def test_ctrl_c_stays_ctrl_c_where_cleaning_up_after_it_fails() -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted()
