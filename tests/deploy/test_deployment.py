"""Servers and sites as real processes on loopback, with TLS and node keys."""

from __future__ import annotations

import re
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fedkeel.deploy.connections import STRANGERS, raise_descriptor_limit
from fedkeel.runs.run import Run
from tests.deploy.real import PROCESSES, Loopback, draw_images
from tests.engine.executors.flower.test_executor import OVER_A_NETWORK, assert_same

pytestmark = PROCESSES


@pytest.fixture
def loopback(tmp_path: Path) -> Iterator[Loopback]:
    draw_images(tmp_path / "images")
    with Loopback(tmp_path) as processes:
        processes.certificates("north", "south", "west")
        processes.certificates("thief", out="elsewhere")
        shutil.copy(tmp_path / "keys/server/ca.pem", tmp_path / "elsewhere/sites/thief/ca.pem")
        yield processes


def test_every_method_over_real_processes_gives_what_it_gives_in_one(loopback: Loopback) -> None:
    for site in ("north", "south", "west"):
        loopback.site(site)
    options = {"model": "simple_cnn(width=4, projector=16)"}
    for number, method in enumerate(OVER_A_NETWORK):  # the sites stay up from one run to the next
        out = f"run{number}"
        loopback.server(out, method=method, **options)
        assert loopback.finish() == 0, f"{method}: {loopback.log('server')}"
        assert_same(Run(loopback.place / out), loopback.serial(f"{out}-serial", method=method, **options))


def test_strangers_stay_out_and_the_others_go_on_without_a_site_that_dies(loopback: Loopback) -> None:
    (loopback.place / "images/west/owl").mkdir()
    (loopback.place / "images/west/cat").rename(loopback.place / "images/west/kat")
    for site in ("north", "south", "west"):
        loopback.site(site)
    loopback.site(
        "thief", folder="images/north", key="../../elsewhere/sites/thief"
    )  # trusts the server, not known to it
    loopback.server("run", "--sites", "3", rounds=3, round_timeout=25.0)
    loopback.until(loopback.checkpointed("run", 0))
    loopback.kill("south")
    assert loopback.finish() == 0, loopback.log("server")
    said = "The site 'west' sits out: it has the class 'kat', and the federation has cat, dog, owl."
    assert said in loopback.log("server")
    run = Run(loopback.place / "run")
    clients = {(record["round"], record["client"]) for record in run.records("client")}
    assert {(0, "north"), (0, "south"), (1, "north"), (2, "north")} <= clients
    assert (2, "south") not in clients
    assert not any(name in ("west", "thief") for _, name in clients)
    assert any(record["client"] == "south" for record in run.records("dropped"))


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


def test_a_site_is_let_in_and_shut_out_while_the_server_runs(loopback: Loopback) -> None:
    """Its key comes, goes, and comes back; the server stays up, and so does the site."""
    place = loopback.place
    key, aside = place / "keys/server/sites/west.pub", place / "west.pub"
    key.rename(aside)
    for site in ("north", "south", "west"):
        loopback.site(site)
    loopback.server("run", method="scaffold", rounds=5_000, round_timeout=40.0)  # as many as it takes
    loopback.until(loopback.checkpointed("run", 1))
    run = Run(place / "run")

    def trained() -> set[int]:
        return {record["round"] for record in run.records("client") if record["client"] == "west"}

    assert not trained()
    assert "let it go: trying again" in loopback.log("west")
    aside.rename(key)
    loopback.until(lambda: len(trained()) > 1)
    assert "The key of 'west' is new: this site is let in." in loopback.log("server")
    assert "The site 'west' came and takes part from now on." in loopback.log("server")
    key.rename(aside)
    loopback.until(lambda: "The key of 'west' is gone: this site is shut out." in loopback.log("server"))
    loopback.until(lambda: any(record["client"] == "west" for record in run.records("dropped")))
    last = max(trained())
    aside.rename(key)
    loopback.until(lambda: max(trained()) > last)
    assert loopback.processes["server"].poll() is None, "it ran all the time"
    assert loopback.log("server").count("Waiting for 2 sites.") == 1


def test_wrong_clocks_and_a_crowd_that_says_nothing_keep_no_site_out(
    loopback: Loopback, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_descriptor_limit()

    def start(site: str, shift: int) -> None:
        monkeypatch.setenv("FEDKEEL_SHIFT", str(shift))
        loopback.site(site, module="tests.deploy.shifted")

    start("north", 8)
    start("west", -4000)
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    loopback.server("run", "--sites", "2", method="scaffold", rounds=3, round_timeout=300.0)
    loopback.until(lambda: "'north' is connected" in loopback.log("server"))
    with ExitStack() as crowd:
        idle = [
            crowd.enter_context(socket.create_connection(("127.0.0.1", loopback.port), timeout=60)) for _ in range(1100)
        ]
        # Without the secret, whatever is said of where it comes from.
        context = ssl.create_default_context(cafile=str(loopback.place / "keys/server/ca.pem"))
        door = socket.create_connection(("127.0.0.1", loopback.port), timeout=60)
        with context.wrap_socket(door, server_hostname="localhost") as stranger:
            words = "POST /v1/control/list-nodes HTTP/1.1\r\nHost: x\r\nX-Forwarded-For: 127.0.0.1\r\n\r\n"
            stranger.sendall(words.encode())
            assert stranger.recv(12) == b"HTTP/1.1 403"
        start("south", -400)  # without it the server does not begin
        assert loopback.finish() == 0, loopback.log("server")
        assert all(end.recv(1) == b"" for end in idle[:-STRANGERS])
    run = Run(loopback.place / "run")
    assert run.records("dropped") == []
    assert {(r["round"], r["client"]) for r in run.records("client")} >= {(2, "north"), (2, "south")}
    for log, said in (
        ("server", r"The clock of 'north' is \d+ s ahead of this server's: that is made up for"),
        ("server", r"The clock of 'south' is \d+ s behind this server's: that is made up for"),
        ("server", r"The clock of 'west' is [34],\d+ s behind this server's, and no more than 900 s"),
        ("north", r"This machine's clock is \d+ s ahead of the server's"),
        ("west", r"This machine's clock is [34],\d+ s behind the server's, and no more than 900 s"),
    ):
        assert re.search(said, loopback.log(log)), said
