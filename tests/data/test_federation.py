"""A federation says what it is in a few lines."""

from __future__ import annotations

from fedkeel import data
from tests import tiny


def test_a_federation_fits_on_a_screen_and_nothing_in_it_is_markup() -> None:
    federation = tiny.federation({"<i>ward": 5, "clinic": 3}, unseen=4)
    lines = repr(federation).splitlines()
    assert lines[0] == ("Federation 'tiny': 36 samples of 3x8x8, 4 classes, 2 clients and 1 unseen in 3 domains")
    assert [line.split() for line in lines[2:]] == [
        ["<i>ward", "<i>ward", "5", "4", "8"],
        ["clinic", "dark", "3", "4", "8"],
        ["stranger", "foreign", "0", "0", "4"],
    ]
    assert "<i>" not in federation._repr_html_()
    assert "&lt;i&gt;ward" in federation._repr_html_()


def test_very_many_clients_are_not_made_to_be_shown() -> None:
    federation = data.load("digits-shift", partition="dirichlet(alpha=0.3, clients=20000, samples=30)")
    assert len(repr(federation).splitlines()) == 15
    assert repr(federation).endswith("and 99,988 more")
