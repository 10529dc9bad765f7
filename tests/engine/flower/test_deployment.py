"""Servers and sites as real processes on loopback, with TLS and node keys."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedkeel.run import Run
from tests.engine.flower.real import Loopback, draw_images
from tests.engine.flower.test_executor import assert_same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed"),
]


@pytest.fixture
def loopback(tmp_path: Path) -> Iterator[Loopback]:
    draw_images(tmp_path / "images")
    with Loopback(tmp_path) as processes:
        processes.certificates("north", "south", "west")
        yield processes


def test_methods_over_real_processes_give_what_they_give_in_one(loopback: Loopback) -> None:
    for site in ("north", "south", "west"):
        loopback.site(site)
    for method in ("fedavg", "hbn", "scaffold+fedbn"):  # the sites stay up from one run to the next
        out = method.replace("+", "-")
        loopback.server(out, method=method)
        assert loopback.finish() == 0, loopback.log("server")
        assert_same(Run(loopback.place / out), loopback.serial(f"{out}-serial", method=method))


def test_a_killed_server_and_a_killed_site_go_on_where_they_were(loopback: Loopback) -> None:
    for site in ("north", "south", "west"):
        loopback.site(site)
    options = {"method": "scaffold+fedbn", "rounds": 4}
    loopback.server("run", **options)
    loopback.until(loopback.checkpointed("run", 1))
    loopback.kill("server")
    loopback.kill("south")  # what it remembers of two rounds is in its files
    loopback.site("south")
    loopback.server("run", **options)
    assert loopback.finish() == 0, loopback.log("server")
    assert_same(Run(loopback.place / "run"), loopback.serial("serial", **options))
