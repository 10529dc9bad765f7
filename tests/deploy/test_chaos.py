"""Eight hospitals on a bad day: sites are killed and started again in the midst of rounds, the server is killed once, a
stranger knocks all the time, and one site knows the classes in another order. All rounds are done, and the model is the
one that the updates which counted make.

What happens is drawn, and each thing happens after another one, never at a time of the clock: a round that has lost a
site cannot end before the site is back or is missed, however fast or slow this machine is.

More days: FEDKEEL_CHAOS="1,2,3" pytest -m network tests/deploy/test_chaos.py
"""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fedkeel.config import from_one
from fedkeel.engine.executors.flower.executor import STATUS
from fedkeel.runs.run import Run
from tests.deploy.real import PROCESSES, Loopback, Networks, draw_images, has_namespaces
from tests.deploy.test_network import assert_as_if_these_had_not_trained

pytestmark = PROCESSES
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
        loopback.site("thief", folder="images/alba", key="../../elsewhere/sites/thief")
        go_through(loopback, random.Random(day))
        check(loopback)


def go_through(loopback: Loopback, chance: random.Random) -> None:
    """Kill whatever comes to hand, and start it again, until the rounds are done."""
    options = {"method": "scaffold", "rounds": ROUNDS, "round_timeout": TIMEOUT, "min_clients": LEAST}
    back: dict[str, Callable[[], bool]] = {}  # who was killed, and after what it is started again
    stored = [0]

    def until(happened: Callable[[], bool]) -> None:
        def look() -> bool:
            stored.append(bytes_in_store(loopback))
            for site in [site for site, after in back.items() if after()]:
                loopback.site(site)
                del back[site]
            return happened()

        loopback.until(look)

    loopback.server("run", **options)
    until(lambda: "did not let this site in" in loopback.log("thief"))
    for site in SITES:
        loopback.site(site)
    until(loopback.checkpointed("run", 0))
    server_dies = chance.randrange(1, ROUNDS - 2)
    for round in range(1, ROUNDS - 1):  # each as soon as the one before is done
        alive = [site for site in SITES if site not in back]
        victims = chance.sample(alive, min(chance.randint(1, 3), len(alive) - LEAST - 1))
        for site in victims:
            loopback.kill(site, family=chance.random() < 0.25)
            at_once, when_missed = (lambda: True), missed(loopback, site, round)
            after = chance.choice([at_once, when_missed, loopback.checkpointed("run", round)])
            back[site] = when_missed if site == victims[0] else after
        if round == server_dies:
            until(chance.choice([under_way(loopback, round), *(missed(loopback, site, round) for site in victims[:1])]))
            loopback.kill("server", family=chance.random() < 0.5)
            loopback.server("run", "--wait", "20", **options)
        until(loopback.checkpointed("run", round))
    until(lambda: not back)
    assert loopback.finish(600) == 0, loopback.log("server")
    model = (loopback.place / "run/model.safetensors").stat().st_size
    assert 0 < max(stored) < 30 * model, "what nobody fetches any more does not pile up"


def missed(loopback: Loopback, site: str, round: int) -> Callable[[], bool]:
    """Whether an update of this site was dropped in this round or a later one; also if the server forgot it again."""
    said = [f"Round {from_one(later)}: the update of '{site}' is dropped" for later in range(round, ROUNDS)]
    return lambda: any(sentence in loopback.log("server") for sentence in said)


def under_way(loopback: Loopback, round: int) -> Callable[[], bool]:
    """Whether the sites were sent the model of this round, or even of a later one."""
    path, done = loopback.place / "run" / STATUS, loopback.checkpointed("run", round)
    return lambda: done() or f"round {from_one(round)}: train, under way" in path.read_text()


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
        assert f"Round {from_one(round)}: the update of '{site}' is dropped, {reason}." in said
    taken = Counter(site for _, site in counted)
    assert set(taken) == set(SITES), "everybody took part"
    assert "thief" not in said
    model = safetensors.torch.load_file(run.directory / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in model.values())
    assert_as_if_these_had_not_trained(loopback, run, set(dropped))
