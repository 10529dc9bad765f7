"""Rounds are counted from 1 wherever a person reads them, by one function."""

from __future__ import annotations

import re
from pathlib import Path

import fedkeel
from fedkeel.config import from_one


def test_the_first_round_is_the_first() -> None:
    assert [from_one(round) for round in range(3)] == [1, 2, 3]


def test_no_sentence_has_a_round_as_programs_count_it() -> None:
    """A round in a text for people goes through `from_one`, or through a name that holds what it gave."""
    counted = r"from_one\(|min\(from_one\(|number\}|len\(rounds\) \+ 1\}"
    wrong = [
        f"{path.name}: {line.strip()}"
        for path in Path(fedkeel.__file__).parent.rglob("*.py")
        for line in path.read_text().splitlines()
        if re.search(rf"""["' ][Rr]ound \{{(?!{counted})""", line)
    ]
    assert wrong == []
