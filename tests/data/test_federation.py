"""A federation says what it is in a few lines."""

from __future__ import annotations

import pytest
import torch

from fedkeel import data
from fedkeel.data.population import Population
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


@pytest.mark.parametrize("many", [True, False])  # clients that are made on demand, and a list of them
def test_on_validation_nobody_has_a_test_sample_any_more(many: bool) -> None:
    if many:
        federation = data.load("digits-shift", unseen="street", partition="even(clients=2)")
    else:
        federation = tiny.federation(unseen=8)
    tests = {int(i) for client in federation for i in client.test}
    chosen = federation.on_validation()
    assert [client.name for client in chosen] == [client.name for client in federation.clients]
    for before, after in zip(federation.clients, chosen.clients, strict=True):
        assert torch.equal(after.train, before.train)
        assert torch.equal(after.test, before.validation)
        assert not tests & {int(i) for part in after.splits for i in part}
    assert (len(chosen.unseen), isinstance(chosen.clients, Population)) == (0, many)
