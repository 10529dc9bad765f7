"""Ours beside the paper's: differences, orders and what is written about them."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from fedkeel.errors import FedkeelError
from fedkeel.experiments.paper_table import PaperCell, Reproduction
from fedkeel.experiments.recipes import PublishedNumber, parse

RECIPE = """
paper = "HBN"
table = "Table 0"
caption = "A table"
measure = "Accuracy in %"
protocol = "Section 0"
seeds = [0, 1]
columns = [{ group = "digits", label = "A" }, { group = "digits", label = "B" }, { label = "C" }]
rows = [{ label = "one" }, { label = "two" }, { label = "three" }]
[base]
rounds = 1
[published]
one = "70.0 60.0 0.55"
two = "80.5 50.0 N/A"
three = "75.0 - ?"
"""


def entry(ours: float | None, paper: str | None = None) -> PaperCell:
    return PaperCell({} if ours is None else {0: ours}, None if paper is None else PublishedNumber.of(paper))


def reproduction(ours: dict[tuple[str, str], list[float]], text: str = RECIPE, **more: object) -> Reproduction:
    recipe = parse("small", text)
    entries = {
        (row.label, column.name): PaperCell(
            dict(enumerate(ours.get((row.label, column.name), []))), recipe.published.get((row.label, column.name))
        )
        for row in recipe.rows
        for column in recipe.columns
        if (row.label, column.name) not in recipe.absent
    }
    return Reproduction(recipe, recipe.rows, recipe.columns, entries, [0, 1], Path("runs"), **more)  # type: ignore[arg-type]


class TestEntry:
    def test_the_difference_is_ours_minus_the_papers(self) -> None:
        both = PaperCell({0: 71.0, 1: 74.0}, PublishedNumber.of("75.0±0.4"))
        assert both.difference == pytest.approx(-2.5)
        assert str(both) == "72.5±2.1 / 75.0±0.4 / -2.5"

    def test_what_is_missing_is_a_dash(self) -> None:
        assert str(entry(None, "75.0")) == "– / 75.0 / –"
        assert str(entry(71.26)) == "71.3 / – / –"
        assert str(entry(71.26, "N/A")) == "71.3 / N/A / –"


class TestReproduction:
    OURS = {  # noqa: RUF012
        ("one", "digits A"): [71.0, 73.0],
        ("two", "digits A"): [80.0],
        ("three", "digits A"): [90.0],
        ("one", "digits B"): [55.0],
        ("two", "digits B"): [54.0],
    }

    def test_a_table_for_each_group(self) -> None:
        tables = list(reproduction(self.OURS).tables())
        assert [(group, headings) for group, headings, _ in tables] == [
            ("digits", ["method", "A", "B"]),
            ("", ["method", "C"]),
        ]
        assert tables[0][2][0] == ["one", "72.0±1.4 / 70.0 / +2.0", "55.0 / 60.0 / -5.0"]
        assert tables[0][2][2] == ["three", "90.0 / 75.0 / +15.0", ""]  # the paper has no such cell

    def test_where_levels_say_nothing_the_distance_to_a_row_is_shown(self) -> None:
        text = RECIPE.replace('caption = "A table"', 'caption = "A table"\nreference = "one"')
        result = reproduction(self.OURS, text)
        assert "ours / ahead of one, here / in the paper" in result.legend
        first, second, third = (row[1] for row in next(iter(result.tables()))[2])
        assert first == "72.0±1.4 / +0.0 / +0.0"
        assert second == "80.0 / +9.0 / +10.5"  # with the seed that both have
        assert third == "90.0 / +19.0 / +5.0"
        assert list(result.tables())[1][2][1][1] == "– / – / –"
        with pytest.raises(FedkeelError, match="there is no row 'none'"):
            reproduction({}, text.replace('reference = "one"', 'reference = "none"'))

    def test_the_sentences_say_where_the_order_is_the_papers(self) -> None:
        first, *others = reproduction(self.OURS).sentences()
        assert first == (
            "The order of methods is the paper's in 1 of 2 columns (digits B); the best one is the paper's in 1 of 2."
        )
        assert len(others) == 1
        assert others[0].startswith("digits A: another order")
        assert "the paper has two > three > one, ours is three > two > one" in others[0]

    def test_columns_can_be_what_is_put_in_order(self) -> None:
        text = RECIPE.replace('caption = "A table"', 'caption = "A table"\norder = "columns"')
        assert reproduction(self.OURS, text).orders() == {
            "one digits": (["A", "B"], ["A", "B"], True),
            "two digits": (["A", "B"], ["A", "B"], True),
        }

    def test_as_json_and_markdown(self) -> None:
        result = reproduction(self.OURS, marks=["QUICK LOOK: few rounds."], failures={"one seed 0": "it broke"})
        document = result.to_dict()
        cell = document["cells"][0]
        assert (cell["row"], cell["column"]) == ("one", "digits A")
        assert cell["ours"] == {"mean": 72.0, "std": pytest.approx(math.sqrt(2)), "seeds": [0, 1]}
        assert cell["paper"] == {"value": 70.0, "spread": None}
        assert cell["difference"] == pytest.approx(2.0)
        assert ("three", "digits B") not in [(c["row"], c["column"]) for c in document["cells"]]
        text = result.markdown()
        assert "**QUICK LOOK: few rounds.**" in text
        assert "| one | 72.0±1.4 / 70.0 / +2.0 | 55.0 / 60.0 / -5.0 |" in text
        assert "- one seed 0: it broke" in text
        lines = text.splitlines()
        assert all(a.count("|") == b.count("|") for a, b in pairwise(lines) if a.startswith("|") and b.startswith("|"))

    def test_what_the_paper_says_and_where_its_figure_is_of_ours_is_told(self) -> None:
        more = 'claims = ["One wins."]\nmisprints = ["70.0 is 71.0 elsewhere."]\ndiagnostics = ["nmi"]\nseeds'
        result = reproduction({}, RECIPE.replace("seeds", more, 1))
        claim, misprint, figure = result.notes()
        assert claim == "The paper: One wins."
        assert misprint == "A misprint: 70.0 is 71.0 elsewhere."
        assert "diagnostics/nmi.json of each run" in figure
        assert reproduction({}).notes() == []


def test_a_difference_that_rounds_to_nothing_has_no_minus() -> None:
    assert str(entry(93.77, "93.8")) == "93.8 / 93.8 / +0.0"
    assert str(entry(93.74, "93.8")) == "93.7 / 93.8 / -0.1"
