from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeel.errors import FedkeelError
from fedkeel.spec import Spec, parse, parse_sum, split


def test_values_are_literals_or_words() -> None:
    spec = parse(
        "folder(root=./images, size=64, ratio=1e-3, flip=true, mask=none, parts=[1, 2], name='a, b', m={'x': 3})"
    )
    assert spec.name == "folder"
    assert spec.options == {
        "root": "./images",
        "size": 64,
        "ratio": 1e-3,
        "flip": True,
        "mask": None,
        "parts": [1, 2],
        "name": "a, b",
        "m": {"x": 3},
    }


def test_a_sum_is_split_outside_of_brackets() -> None:
    assert parse_sum("a(x='1+2') + b(y=[1+1])+c") == [Spec("a", {"x": "1+2"}), Spec("b", {"y": "[1+1]"}), Spec("c")]


def test_dashes_in_options_are_underscores() -> None:
    assert parse("hbn(stats-batch=4)").options == {"stats_batch": 4}


@pytest.mark.parametrize(
    "text", ["", "  ", "a b", "(x=1)", "a(x=1", "a(x=1)b", "a(1)", "a(x)", "a(x=1, x=2)", "a+", "+a", "a++b", "a(2x=1)"]
)
def test_what_cannot_be_read_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(FedkeelError) as caught:
        parse_sum(text)
    assert "\n" not in str(caught.value)


values = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.booleans(),
    st.none(),
    st.text(max_size=12),
    st.lists(st.integers(), max_size=3),
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(["root", "size", "a_b"]), values, max_size=3))
def test_what_is_written_is_read_again(options: dict[str, object]) -> None:
    spec = Spec("name", options)
    assert parse(str(spec)) == spec
    assert parse_sum(f"{spec}+other") == [spec, Spec("other")]


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    assert "+".join(split(text, "+")) == text
    with contextlib.suppress(FedkeelError):
        parse_sum(text)
