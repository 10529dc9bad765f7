"""Tables: whole in a pipe, and whatever a name has in it, it is shown and not obeyed."""

from __future__ import annotations

import io

import pytest

from fedkeel.cli.terminal.console import console, drawn
from fedkeel.cli.terminal.output import Table, duration
from fedkeel.core.naming import visible
from fedkeel.experiments.tables import DASH, Cell, Results, sparkline


def test_a_table_in_a_pipe_is_never_cut() -> None:
    domains = {f"a-domain-with-a-long-name-{number}": 0.5 for number in range(20)}
    summary = {"result": "last", "domains": domains, "accuracy": 0.5, "unseen_domains": []}
    stream = io.StringIO()
    console(stream).print(drawn(Results.of([("fedavg", 0, summary), ("gn", 0, summary)])))
    assert all(name in stream.getvalue() for name in domains)
    assert "…" not in stream.getvalue()


def test_spread_is_blank_with_a_single_seed() -> None:
    assert str(Cell({0: 0.5})) == "50.0"
    assert str(Cell({0: 0.5, 1: 0.5})) == "50.0 ±0.0"


def test_duration() -> None:
    assert [duration(seconds) for seconds in (0, 59.6, 3661)] == ["0:00", "1:00", "1:01:01"]


def test_a_sparkline_spans_from_lowest_to_highest_and_keeps_the_ends() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert sparkline([]) == ""
    long = sparkline([number / 500 for number in range(501)], width=60)
    assert len(long) == 60
    assert (long[0], long[-1]) == ("▁", "█")


HOSTILE = ("[/b]", "[bold]x[/bold]", "[link=x]y", ":bomb:", "\x1b[31mred", "a\rb", "a\nb", "\x9b2J", "\udcff")


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_name_is_shown_and_not_obeyed(name: str) -> None:
    seen = visible(name)
    summaries = {"domains": {name: 0.5, "b": 0.4}, "unseen_domains": [name], "accuracy": 0.5, "result": "last"}
    stream = io.StringIO()
    out = console(stream)
    out.print(drawn(Results.of([(name, 0, summaries), (f"{name}@x=1", 0, summaries)])))
    out.print(drawn(Table([name], [[name]], f"of {name}")))
    out.print(f"- {name}")
    text = stream.getvalue()
    assert text.count(seen) >= (4 if "\n" in name else 6)
    assert not set(text) & set("\x1b\r\x9b\udcff")


def test_a_dash_among_numbers_leaves_them_to_the_right() -> None:
    table = drawn(Table(["domain", "accuracy %"], [["a", "22.2"], ["b", DASH]]))
    assert [column.justify for column in table.columns] == ["left", "right"]
