"""Eight hospitals on a bad day: sites are killed and started again at random moments, the server is killed once, a
stranger knocks all the time, and one site knows the classes in another order. All rounds are done, and the model is the
one that the updates which counted make.

More days: FEDKEEL_CHAOS="1,2,3" pytest -m network tests/engine/flower/test_chaos.py
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import sqlite3
import time
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fedkeel.runs.run import Run
from tests.deploy.real import Loopback, Networks, draw_images, has_namespaces
from tests.deploy.test_network import assert_as_if_these_had_not_trained

pytestmark = [
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="flwr is not installed"),
]
SITES = {"alba": 5, "bern": 6, "chur": 4, "davos": 7, "elm": 5, "flims": 4, "genf": 6, "horn": 5}
ROUNDS, TIMEOUT, LEAST = 6, 45.0, 3
DAYS = [int(day) for day in os.environ.get("FEDKEEL_CHAOS", "1").split(",")]


@pytest.mark.parametrize("day", DAYS)
def test_a_federation_survives_a_bad_day(tmp_path: Path, day: int) -> None:
    draw_images(tmp_path / "images", SITES)
    shutil.rmtree(tmp_path / "images/horn/cat")  # so that its own first class is the others' second
    networks = Networks(*SITES, "thief") if has_namespaces() else None
    with networks or nullcontext(), Loopback(tmp_path, networks) as loopback:
        loopback.certificates(*SITES)
        loopback.certificates("thief", out="elsewhere")
        shutil.copy(tmp_path / "keys/server/ca.pem", tmp_path / "elsewhere/sites/thief/ca.pem")
        for site in SITES:
            loopback.site(site)
        loopback.site("thief", folder="images/alba", key="../../elsewhere/sites/thief")
        go_through(loopback, random.Random(day))
        check(loopback)


def go_through(loopback: Loopback, chance: random.Random) -> None:
    """Kill whatever comes to hand, and start it again, until the rounds are done."""
    options = {"method": "scaffold", "rounds": ROUNDS, "round_timeout": TIMEOUT, "min_clients": LEAST}
    loopback.server("run", **options)
    loopback.until(loopback.checkpointed("run", 0))
    killed_at, back = chance.randrange(1, ROUNDS - 2), dict[str, float]()
    most, deadline = 0, time.monotonic() + 900
    next_kill = time.monotonic()
    while loopback.processes["server"].poll() is None:
        assert time.monotonic() < deadline, loopback.log("server")
        time.sleep(0.2)
        most = max(most, bytes_in_store(loopback))
        if killed_at and loopback.checkpointed("run", killed_at)():
            time.sleep(chance.uniform(0, 3))
            loopback.kill("server", family=chance.random() < 0.5)
            loopback.server("run", "--wait", "20", **options)
            killed_at = 0
        for site in [site for site, moment in back.items() if time.monotonic() > moment]:
            loopback.site(site)
            del back[site]
        alive = [site for site in SITES if site not in back]
        if time.monotonic() > next_kill and len(alive) > LEAST + 1:
            site = chance.choice(alive)
            loopback.kill(site, family=chance.random() < 0.25)
            back[site] = time.monotonic() + chance.uniform(0, 10)
            next_kill = time.monotonic() + chance.uniform(6, 18)
    assert not killed_at, "the server was killed and started again"
    assert loopback.finish() == 0, loopback.log("server")
    model = (loopback.place / "run/model.safetensors").stat().st_size
    assert 0 < most < 30 * model, "what nobody fetches any more does not pile up"


def bytes_in_store(loopback: Loopback) -> int:
    """Of messages, in Flower's database."""
    path = loopback.place / "run/flower/link.db"
    with suppress(sqlite3.Error):
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            return int(connection.execute("SELECT COALESCE(SUM(LENGTH(content)), 0) FROM objects").fetchone()[0])
        finally:
            connection.close()
    return 0


def check(loopback: Loopback) -> None:
    run, said = Run(loopback.place / "run"), loopback.log("server")
    counted = {(record["round"], record["client"]) for record in run.records("client")}
    dropped = {(record["round"], record["client"]): record["reason"] for record in run.records("dropped")}
    assert [record["round"] for record in run.records("round")] == list(range(ROUNDS))
    assert counted | set(dropped) == {(round, site) for round in range(ROUNDS) for site in SITES}, (
        "each is accounted for"
    )
    assert not counted & set(dropped)
    assert dropped, "a bad day"
    for (round, site), reason in dropped.items():
        assert f"Round {round}: the update of '{site}' is dropped, {reason}." in said
    taken = Counter(site for _, site in counted)
    assert set(taken) == set(SITES), "everybody took part"
    assert "thief" not in said
    assert "did not let this site in" in loopback.log("thief")
    model = safetensors.torch.load_file(run.directory / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in model.values())
    assert_as_if_these_had_not_trained(loopback, run, set(dropped))
