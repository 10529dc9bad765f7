"""Real federations of a server and three sites on loopback, with TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedkeel.runs.run import Run
from tests.deploy.real import PROCESSES, SITES, Loopback, draw_images
from tests.engine.executors.sites.test_executor import assert_same

pytestmark = PROCESSES


@pytest.fixture
def loopback(tmp_path: Path) -> Iterator[Loopback]:
    draw_images(tmp_path / "images")
    with Loopback(tmp_path) as network:
        yield network


def begin(loopback: Loopback, out: str, method: str, rounds: int, *words: str) -> None:
    loopback.server(out, method=method, rounds=rounds)
    loopback.until(lambda: (loopback.place / "kits/sites/west/local/comm_config.json").exists())
    for site in SITES:
        if site not in loopback.processes:
            loopback.site(site, *words)


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "hbn", "fedbn"])
def test_a_federation_gives_what_one_process_gives(loopback: Loopback, method: str) -> None:
    begin(loopback, "run", method, 2, "--calibrate")
    assert loopback.finish() == 0, loopback.log("server")
    assert_same(Run(loopback.place / "run"), loopback.serial("serial", method=method))
    for site in SITES:
        assert f"carry 'kits/sites/{site}' to the site {site}" in loopback.log("server")
        assert len(list((loopback.place / "state" / site / "models").glob("*/model.safetensors"))) == 1


def test_a_federation_whose_server_and_a_site_are_killed_ends_as_if_nothing_had_happened(loopback: Loopback) -> None:
    """SCAFFOLD's control variates are at the sites, and the server's at the server."""
    begin(loopback, "run", "scaffold", 60)
    loopback.until(loopback.checkpointed("run", 3))
    loopback.kill("server")
    loopback.kill("south")
    begin(loopback, "run", "scaffold", 60)  # the same commands once more
    assert loopback.finish() == 0, loopback.log("server")
    run = Run(loopback.place / "run")
    missed = {record["client"] for record in run.records("dropped")}
    assert missed <= {"south"}
    if not missed:
        assert_same(run, loopback.serial("serial", method="scaffold", rounds=60))


def test_a_site_that_is_killed_is_missed_and_is_back_with_the_next_job(loopback: Loopback) -> None:
    begin(loopback, "run", "fedavg", 400)
    loopback.until(loopback.checkpointed("run", 3))
    loopback.kill("south")
    loopback.site("south")
    loopback.until(lambda: "south came: the next job goes on" in loopback.log("server"), 120)
    rounds = Run(loopback.place / "run").rounds_done
    loopback.until(loopback.checkpointed("run", rounds + 3))
    loopback.stop("server")
    assert "fedkeel: stopped; continue with: fedkeel server" in loopback.log("server")
    assert Run(loopback.place / "run").rounds_done > 3


def test_a_kit_that_was_loosened_by_hand_is_refused(loopback: Loopback) -> None:
    loopback.server("run")
    local = loopback.place / "kits/sites/west/local"
    loopback.until(lambda: (local / "comm_config.json").exists())
    resources = (local / "resources.json").read_text()
    (local / "resources.json").write_text(
        resources.replace('"allow_log_streaming": false', '"allow_log_streaming": true')
    )
    loopback.site("west")
    assert loopback.processes["west"].wait(timeout=60) == 2
    assert "'resources.json' in" in loopback.log("west")
