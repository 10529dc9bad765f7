"""Commands are printed as a person would type them."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkeel.core.readable import shell


@pytest.mark.parametrize(
    ("word", "typed"),
    [
        ("fedavg", "fedavg"),
        ("fedprox(mu=0.1)", "'fedprox(mu=0.1)'"),
        ("digits(train_transform='resize(size=16)')", "\"digits(train_transform='resize(size=16)')\""),
        ("it's", '"it\'s"'),
    ],
)
def test_quotes_go_around_those_of_the_other_kind(word: str, typed: str) -> None:
    assert shell(["fedkeel", word]) == f"fedkeel {typed}"


@given(st.lists(st.text(st.sampled_from("a'\"$`\\! (\n")), min_size=1))
def test_what_is_printed_is_read_as_it_was_meant(words: list[str]) -> None:
    assert shlex.split(shell(words)) == words


def test_a_shell_expands_nothing_in_it() -> None:
    words = ["$HOME", "it's $HOME", "it's `date`", "it's \\\\ ", "a 'b' \"c\"", "(x='*')", ""]
    said = subprocess.run(["sh", "-c", shell(["printf", "%s\\n", *words])], capture_output=True, text=True, check=True)
    assert said.stdout.split("\n")[:-1] == words
