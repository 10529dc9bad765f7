"""Claims: what holds, what does not and what is undecided, from differences with the same seed."""

import math
import statistics

import pytest

from fedkeel.errors import FedkeelError
from fedkeel.experiments.recipes import PAPERS, load, parse
from fedkeel.methods import build
from tests.tools.lines import small

from claims import Claim, claims_of, judge  # isort: skip

CLAIM = Claim(says="Groups are better.", recipe="small", row="GN", over=("FedAvg",))


def cells(*pairs: tuple[float, float]) -> dict[tuple[str, str], dict[int, float]]:
    """GN's and FedAvg's number of each seed, the same in both columns but for a step that both rows share."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for seed, both in enumerate(pairs):
        for row, value in zip(("GN", "FedAvg"), both, strict=True):
            found.setdefault((row, "digits scan"), {})[seed] = value
            found.setdefault((row, "digits paper"), {})[seed] = value + 7
    return found


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [
        ([(52, 50), (62, 60.1), (41, 39.1)], "holds"),  # the same everywhere, however much the seeds differ
        ([(50, 52), (60.1, 62), (39.1, 41)], "does not hold"),
        ([(52, 50), (60, 61), (41, 38)], "undecided"),
        ([(52, 50), (62, 60)], "undecided"),  # two seeds
        ([], "undecided"),
    ],
)
def test_a_verdict(pairs: list[tuple[float, float]], verdict: str) -> None:
    assert judge(CLAIM, small(), cells(*pairs)).text == verdict


def test_the_interval_is_students() -> None:
    (found,) = judge(CLAIM, small(), cells((52, 50), (63, 60), (42, 38))).differences
    assert found.ours.by_seed == {0: 2, 1: 3, 2: 4}
    assert found.ours.mean == 3
    assert found.ours.half_width == pytest.approx(4.302653 * statistics.stdev([2, 3, 4]) / math.sqrt(3), rel=1e-5)
    assert found.paper == 20


def test_columns_with_fewer_seeds_than_a_verdict_needs_wait() -> None:
    found = cells((52, 50), (62, 60), (42, 40))
    del found["FedAvg", "digits paper"][1]
    (difference,) = judge(CLAIM, small(), found).differences
    assert (difference.columns, list(difference.ours.by_seed)) == (("digits scan",), [0, 1, 2])
    del found["FedAvg", "digits scan"][2]
    (difference,) = judge(CLAIM, small(), found).differences
    assert (difference.columns, list(difference.ours.by_seed)) == (("digits scan", "digits paper"), [0])


def test_ahead_of_all_is_as_far_as_of_the_nearest() -> None:
    both = Claim(says="Best.", recipe="small", row="GN", over=("FedAvg", "GN"))
    verdict = judge(both, small(), cells((52, 50), (62, 60.1), (41, 39.1)))
    assert (verdict.text, verdict.decisive.over) == ("undecided", "GN")


def test_a_margin_moves_the_other_row_and_less_may_be_ahead() -> None:
    within = Claim(says="Close.", recipe="small", row="FedAvg", over=("GN",), margin=3.0)
    found = cells((52, 50), (63, 60.9), (42, 40.1))
    (difference,) = judge(within, small(), found).differences
    assert difference.over == "GN - 3"
    assert difference.ours.by_seed == pytest.approx({0: 1.0, 1: 0.9, 2: 1.1})
    assert difference.paper == pytest.approx(-17)
    assert judge(within, small(), found).text == "holds"
    less = Claim(says="Less.", recipe="small", row="FedAvg", over=("GN",), lower=True)
    assert judge(less, small(), found).text == "holds"
    assert judge(less, small(), found).differences[0].paper == 20


def test_further_ahead_in_some_columns_than_in_others() -> None:
    found = cells((52, 50), (63, 60.9), (42, 40.1))
    found["GN", "digits paper"] = {seed: value + 5 for seed, value in found["GN", "digits paper"].items()}
    more = Claim("More.", "small", "GN", ("FedAvg",), columns=("digits paper",), than=("digits scan",))
    (difference,) = judge(more, small(), found).differences
    assert difference.over == "FedAvg, more than in digits scan"
    assert difference.ours.by_seed == pytest.approx({0: 5.0, 1: 5.0, 2: 5.0})
    assert difference.paper == 0  # 20 points in both
    del found["FedAvg", "digits scan"]
    assert judge(more, small(), found).differences[0].ours.by_seed == {}  # nothing to compare with


def test_a_rows_own_numbers_are_compared_with_zero() -> None:
    found = cells((-2, 1), (-3, 1), (-2.5, 1))
    below = Claim("Below.", "small", "GN", ("zero",), columns=("digits scan",), lower=True)
    assert judge(below, small(), found).differences[0].ours.by_seed == {0: 2, 1: 3, 2: 2.5}
    falls = Claim("Falls.", "small", "GN", ("zero",), columns=("digits paper",), than=("digits scan",))
    assert judge(falls, small(), found).differences[0].ours.by_seed == {0: 7, 1: 7, 2: 7}
    assert judge(falls, small(), found).differences[0].paper == 10


def test_by_another_rule_nothing_is_printed() -> None:
    sooner = Claim("Sooner.", "small", "GN", ("FedAvg",), rule="every-round")
    assert judge(sooner, small(), cells((52, 50), (63, 60.9), (42, 40.1))).differences[0].paper is None


def test_what_is_shown_is_what_decided() -> None:
    """A row that is clearly ahead decides, whatever the others say."""
    recipe = parse("three", THREE)
    found = {
        ("A", "x"): {0: 50.0, 1: 60.0, 2: 70.0},
        ("clearly", "x"): {0: 51.0, 1: 61.1, 2: 71.0},
        ("widely", "x"): {0: 40.0, 1: 90.0, 2: 60.0},
    }
    verdict = judge(Claim("Best.", "three", "A", ("widely", "clearly", "not run")), recipe, found)
    assert (verdict.text, verdict.decisive.over) == ("does not hold", "clearly")


THREE = """
paper = "HBN"
table = "Table 0"
caption = "x"
measure = "x"
protocol = "x"
seeds = [0]
columns = [{ label = "x" }]
rows = [{ label = "A" }, { label = "clearly" }, { label = "widely" }, { label = "not run" }]
[base]
rounds = 1
"""


def test_an_unknown_row_or_column_is_named() -> None:
    with pytest.raises(FedkeelError, match="no row of 'small'"):
        judge(Claim(says="x", recipe="small", row="NG", over=("FedAvg",)), small(), {})
    with pytest.raises(FedkeelError, match="no column of 'small'"):
        judge(Claim(says="x", recipe="small", row="GN", over=("FedAvg",), columns=("letters",)), small(), {})


@pytest.mark.parametrize("paper", PAPERS)
def test_the_papers_claims_name_what_is_there_and_agree_with_its_numbers(paper: str) -> None:
    claims = claims_of(paper)
    assert len(claims) >= 3
    for claim in claims:
        recipe = load(claim.recipe)
        assert claim.rule in ("", "every-round")
        if claim.rule:  # evaluated seldom, the last ten rounds would be most of it
            assert all(recipe.config(*cell).evaluate_every == 1 for cell in recipe.cells())
        for difference in judge(claim, recipe, {}).differences:
            known = difference.paper
            assert known is None or known > 0, f"{claim.says} {difference.over}: the paper's own numbers say otherwise"


def test_no_verdict_rests_on_a_moving_average_that_is_still_where_it_began() -> None:
    judged = 0
    for claim in claims_of("hbn"):
        recipe = load(claim.recipe)
        for config in (recipe.config(*cell) for cell in recipe.cells() if cell[0].label in claim.over):
            if "statistics=moving-average" in config.method:
                judged += 1
                assert (1 - build(config.method).momentum) ** config.rounds < 0.01, claim.recipe
    assert judged >= 2
