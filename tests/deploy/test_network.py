"""Sites that hang, are cut off, or lie, as real processes: the others go on, and the log says who and why."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from fedkeel.config import from_one
from fedkeel.core.messages import Broadcast, Update
from fedkeel.core.state import Tensors
from fedkeel.engine.failures import ClientFailure
from fedkeel.engine.local import Worker
from fedkeel.runs.run import Run
from tests.deploy.real import PROCESSES, Loopback, Networks, draw_images, has_namespaces

pytestmark = PROCESSES
SITES = ("north", "south", "west")
TIMEOUT = 30.0


@pytest.fixture
def loopback(tmp_path: Path) -> Iterator[Loopback]:
    draw_images(tmp_path / "images")
    with Loopback(tmp_path) as processes:
        processes.certificates(*SITES)
        yield processes


def trained(run: Run, site: str) -> list[int]:
    return [record["round"] for record in run.records("client") if record["client"] == site]


def missed(run: Run, site: str) -> dict[int, str]:
    return {record["round"]: record["reason"] for record in run.records("dropped") if record["client"] == site}


def assert_went_through_it(loopback: Loopback, site: str, rounds: int) -> None:
    """It took part, missed some rounds for a reason that the log tells, and took part again; the others in all."""
    assert loopback.finish() == 0, loopback.log("server")
    run = Run(loopback.place / "run")
    reasons = missed(run, site)
    assert reasons
    assert set(reasons.values()) <= {f"it did not reply within {TIMEOUT:g} s", "it is not connected"}
    for round, reason in reasons.items():
        assert f"Round {from_one(round)}: the update of '{site}' is dropped, {reason}." in loopback.log("server")
    assert trained(run, site)[0] == 0
    assert trained(run, site)[-1] == rounds - 1
    for other in SITES:
        if other != site:
            assert trained(run, other) == list(range(rounds))
    assert_as_if_these_had_not_trained(loopback, run, {(round, site) for round in reasons})


def assert_as_if_these_had_not_trained(loopback: Loopback, run: Run, missed: set[tuple[int, str]]) -> None:
    """The model is that of one process in which these sites failed in these rounds; SCAFFOLD would tell the
    difference."""
    usual = Worker.train

    def train(self: Worker, name: str, broadcast: Broadcast, memory: Tensors) -> tuple[Update, Tensors]:
        if (broadcast.round, name) in missed:
            raise ClientFailure("it is not there")
        return usual(self, name, broadcast, memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "train", train)
        options = {name: getattr(run.config, name) for name in ("method", "rounds", "min_clients")}
        wanted = loopback.serial("serial", **options)
    ours, theirs = (safetensors.torch.load_file(r.directory / "model.safetensors") for r in (run, wanted))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-4, atol=1e-5)


def go_on(loopback: Loopback, rounds: int) -> None:
    """Enough rounds, and a start."""
    for site in SITES:
        loopback.site(site)
    loopback.server("run", method="scaffold", rounds=rounds, round_timeout=TIMEOUT)
    loopback.until(loopback.checkpointed("run", 0))


def test_a_site_that_hangs_is_missed_and_takes_part_again_when_it_wakes(loopback: Loopback) -> None:
    go_on(loopback, rounds=60)
    loopback.freeze("south")
    loopback.until(lambda: bool(missed(Run(loopback.place / "run"), "south")))
    loopback.thaw("south")
    assert_went_through_it(loopback, "south", rounds=60)


@pytest.mark.skipif(not has_namespaces(), reason="there are no network namespaces here, or they are not ours to make")
def test_a_site_whose_cable_is_pulled_is_missed_and_takes_part_again_when_it_is_back(tmp_path: Path) -> None:
    draw_images(tmp_path / "images")
    with Networks(*SITES) as networks, Loopback(tmp_path, networks) as loopback:
        loopback.certificates(*SITES)
        go_on(loopback, rounds=60)
        networks.cut("south")
        loopback.until(lambda: bool(missed(Run(loopback.place / "run"), "south")))
        networks.mend("south")
        assert_went_through_it(loopback, "south", rounds=60)


def test_whatever_a_site_sends_the_others_go_on(loopback: Loopback) -> None:
    for site in SITES:
        loopback.site(site, module="tests.deploy.liar" if site == "south" else "fedkeel")
    loopback.server("run", method="fedavg", rounds=8)
    assert loopback.finish() == 0, loopback.log("server")
    run = Run(loopback.place / "run")
    reasons = missed(run, "south")
    assert list(reasons) == [1, 2, 3, 4, 5, 6], loopback.log("south")
    assert "bytes" in reasons[1]
    assert "it cannot be read" in reasons[2]
    assert "it cannot be read" in reasons[3]
    assert "its reply cannot be read" in reasons[4]
    assert reasons[5] == "it is of round 1, not of round 6"
    assert "not finite" in reasons[6]
    assert trained(run, "south") == [0, 7]
    assert trained(run, "north") == trained(run, "west") == list(range(8))


def test_a_site_that_comes_late_takes_part_and_one_that_does_not_fit_sits_out(loopback: Loopback) -> None:
    (loopback.place / "images/west/cat").rename(loopback.place / "images/west/kat")
    loopback.site("north")
    loopback.server("run", "--sites", "1", method="scaffold", rounds=20)
    loopback.until(loopback.checkpointed("run", 0))
    loopback.freeze("north")  # the round waits for it, and so for those who come
    loopback.site("south")
    loopback.site("west")
    loopback.until(lambda: loopback.connected("south") and loopback.connected("west"))
    loopback.thaw("north")
    assert loopback.finish() == 0, loopback.log("server")
    run = Run(loopback.place / "run")
    assert trained(run, "north") == list(range(20))
    late = trained(run, "south")
    assert late == list(range(late[0], 20))
    assert late[0] > 0
    assert "The site 'south' came and takes part from now on." in loopback.log("server")
    assert trained(run, "west") == []
    assert "The site 'west' sits out: it has the class 'kat'" in loopback.log("server")
