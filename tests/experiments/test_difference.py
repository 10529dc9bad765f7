"""The one rule of who is ahead: paired over seeds, Student's interval, and what other test images could change."""

from __future__ import annotations

import math
import statistics

import pytest

from fedkeel.experiments.difference import AHEAD, BEHIND, TOO_FEW, UNDECIDED, Cell, Difference, unbeaten


def cell(*values: float) -> Cell:
    return Cell(dict(enumerate(values)))


@pytest.mark.parametrize(
    ("one", "other", "verdict"),
    [
        ((0.52, 0.62, 0.41), (0.50, 0.60, 0.39), AHEAD),  # by the same with every seed, however much the seeds differ
        ((0.50, 0.60, 0.39), (0.52, 0.62, 0.41), BEHIND),
        ((0.62, 0.61, 0.60), (0.60, 0.55, 0.52), UNDECIDED),  # 5 ±7.6, though the ranges do not touch
        ((0.8, 0.8, 0.8), (0.8, 0.8, 0.8), UNDECIDED),
        ((0.1 + 0.2,) * 3, (0.3,) * 3, UNDECIDED),  # but for rounding the same
        ((0.9, 0.9), (0.1, 0.1), TOO_FEW),
        ((0.9,), (0.1,), TOO_FEW),
        ((), (0.1,), TOO_FEW),
    ],
)
def test_a_verdict(one: tuple[float, ...], other: tuple[float, ...], verdict: str) -> None:
    assert Difference.of(cell(*one), cell(*other)).verdict == verdict


def test_the_interval_is_students_over_the_seeds_that_both_have() -> None:
    found = Difference.of(Cell({0: 0.5, 1: 0.7, 2: 0.6, 7: 0.1}), Cell({8: 0.9, 2: 0.5, 1: 0.5, 0: 0.5}))
    assert found.by_seed == pytest.approx({0: 0.0, 1: 0.2, 2: 0.1})
    assert found.mean == pytest.approx(0.1)
    assert found.half_width == pytest.approx(4.302653 * statistics.stdev([0, 0.2, 0.1]) / math.sqrt(3), rel=1e-6)
    assert found.verdict == UNDECIDED
    assert math.isinf(Difference.of(cell(0.5), cell(0.4)).half_width)


def test_what_other_test_images_could_change_is_not_claimed() -> None:
    one, other = cell(0.84, 0.84, 0.84), cell(0.80, 0.80, 0.80)
    assert Difference.of(one, other, [10_000]).verdict == AHEAD
    assert Difference.of(one, other, [90]).verdict == UNDECIDED
    assert Difference.of(other, one, [90]).verdict == UNDECIDED


def test_the_margin_is_that_of_a_difference_of_two_shares() -> None:
    """1.96 sqrt(2 p (1 - p) / n); and as if all images were one set, where domains have equally many."""
    half = cell(0.4, 0.5, 0.6)
    assert Difference.of(half, half, [200]).floor == pytest.approx(0.098)
    assert Difference.of(half, half, [100, 100]).floor == pytest.approx(0.098)
    assert Difference.of(half, half, [100, 0]).floor == 0, "not known"


def test_bold_is_what_no_other_is_ahead_of_where_something_is_decided() -> None:
    column = {
        "first": cell(0.90, 0.91, 0.95),
        "undecided": cell(0.91, 0.90, 0.90),
        "beaten": cell(0.80, 0.81, 0.85),
        "one seed": cell(0.99),
    }
    assert unbeaten(column) == {"first", "undecided"}
    assert unbeaten(column, lower=True) == {"beaten"}
    assert unbeaten(column, [20]) == set(), "nothing is decided"
    assert unbeaten({"first": column["first"]}) == unbeaten({}) == set()
