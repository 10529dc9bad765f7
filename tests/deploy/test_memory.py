"""What sites remember: of a round that does not count, nothing; otherwise as in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fedkeel.deploy.memory import KEPT_RUNS, SiteMemory
from fedkeel.engine.executors.sites.channel import Reply
from fedkeel.engine.local import Worker
from fedkeel.errors import StoreError
from tests import tiny
from tests.deploy.loop import in_one_process, over_network
from tests.deploy.test_faults import changed, loop_of, spoiling, swallow
from tests.engine.executors.sites.test_executor import assert_same, near

pytestmark = pytest.mark.slow

METHOD = "scaffold+fedbn"  # control variates on both sides, and layers that never travel


@pytest.fixture
def bad_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever engine, the clinic trains in round 1 as always, and sends numbers that are none."""
    usual = Worker.train

    def train(self: Worker, name: str, broadcast: Any, memory: Any) -> Any:
        update, kept = usual(self, name, broadcast, memory)
        if name == "clinic" and broadcast.round == 1:
            update = replace(update, weights={key: t * torch.nan for key, t in update.weights.items()})
        return update, kept

    monkeypatch.setattr(Worker, "train", train)


@pytest.mark.usefixtures("bad_update")
def test_a_site_whose_update_is_dropped_remembers_what_it_did_before(tmp_path: Path) -> None:
    run = over_network(tmp_path / "network", METHOD, rounds=4)
    assert [(r["round"], r["client"]) for r in run.records("dropped")] == [(1, "clinic")]
    assert_same(run, in_one_process(tmp_path / "serial", METHOD, rounds=4))


@pytest.mark.usefixtures("bad_update")
def test_a_restarted_server_still_knows_whose_update_was_dropped(tmp_path: Path) -> None:
    """It dies right after the checkpoint of that round; the site thinks that its update counted."""
    loop = loop_of(tmp_path / "network")

    def die(round: int) -> None:
        if round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        over_network(tmp_path / "network", METHOD, loop=loop, observer=tiny.Notes(die), rounds=4)
    run = over_network(tmp_path / "network", METHOD, loop=loop, rounds=4)
    assert_same(run, in_one_process(tmp_path / "serial", METHOD, rounds=4))


@pytest.mark.parametrize("spoil", [swallow, changed(samples=-1)], ids=["lost on its way", "refused"])
def test_a_reply_that_does_not_count_leaves_no_trace_at_the_site(
    tmp_path: Path, spoil: Callable[[Reply], Reply], request: pytest.FixtureRequest
) -> None:
    loop = spoiling(loop_of(tmp_path / "network"), "train", spoil)
    run = over_network(tmp_path / "network", METHOD, loop=loop, rounds=4)
    request.getfixturevalue("bad_update")
    wanted = in_one_process(tmp_path / "serial", METHOD, rounds=4)
    models = [safetensors.torch.load_file(r.directory / "model.safetensors") for r in (run, wanted)]
    torch.testing.assert_close(*models, rtol=1e-5, atol=1e-6)
    ours, theirs = ([e for e in r.records("evaluation") if e["round"] == 3] for r in (run, wanted))
    assert ours == [near(evaluation) for evaluation in theirs]


@pytest.mark.usefixtures("bad_update")
def test_a_round_with_too_few_updates_leaves_no_trace_at_any_site(tmp_path: Path) -> None:
    run = over_network(tmp_path / "network", METHOD, rounds=4, min_clients=3)
    assert_same(run, in_one_process(tmp_path / "serial", METHOD, rounds=4, min_clients=3))


def test_a_site_that_misses_a_repeated_round_forgets_what_it_did_there_the_first_time(tmp_path: Path) -> None:
    """The server dies in round 2 before the checkpoint; when it repeats the round, the clinic is away."""
    loop = loop_of(tmp_path / "network")

    def die(round: int) -> None:
        if round == 2:
            raise KeyboardInterrupt

    options = {"rounds": 5, "checkpoint_every": 2}
    with pytest.raises(KeyboardInterrupt):
        over_network(tmp_path / "network", METHOD, loop=loop, observer=tiny.Notes(die), **options)
    spoiling(loop, "train", swallow, round=2)
    run = over_network(tmp_path / "network", METHOD, loop=loop, **options)

    never = spoiling(loop_of(tmp_path / "never"), "train", swallow, round=2)
    wanted = over_network(tmp_path / "never", METHOD, loop=never, **options)
    assert_same(run, wanted)


def test_an_update_that_krum_does_not_choose_leaves_no_trace_at_its_site(tmp_path: Path) -> None:
    options = {"robust": "krum(liars=0)", "rounds": 4}
    run = over_network(tmp_path / "network", METHOD, **options)
    assert len(run.records("not chosen")) == 2 * 4
    assert_same(run, in_one_process(tmp_path / "serial", METHOD, **options))


def test_memory_after_a_step_is_that_of_the_last_one_that_counts(tmp_path: Path) -> None:
    memory = SiteMemory(tmp_path / "run", keep=10)
    assert memory.after(None) == {}
    for round in range(4):
        memory.keep((round, 0), {"x": torch.tensor(float(round))})
    assert memory.after((2, 0))["x"] == 2
    assert memory.after((3, 0))["x"] == 2, "what came later was forgotten"
    assert memory.after((1, 7))["x"] == 1
    assert memory.after(None) == {}
    assert memory.after((3, 0)) == {}


def test_a_memory_that_counts_outlives_any_number_of_rounds_that_do_not(tmp_path: Path) -> None:
    memory = SiteMemory(tmp_path / "run", keep=2)
    memory.keep((0, 0), {"x": torch.tensor(7.0)})
    for round in range(1, 9):
        assert memory.after((0, 0))["x"] == 7
        memory.keep((round, 0), {"x": torch.tensor(float(round))})
    for round in range(9, 20):
        assert memory.after((round - 1, 0))["x"] == round - 1
        memory.keep((round, 0), {"x": torch.tensor(float(round))})
    assert len(list(tmp_path.rglob("*.safetensors"))) <= 3 + 1


def test_a_memory_that_was_cut_is_told_of_and_not_used(tmp_path: Path) -> None:
    memory = SiteMemory(tmp_path / "run", keep=3)
    memory.keep((0, 0), {"control": torch.arange(6.0)})
    (file,) = tmp_path.rglob("*.safetensors")
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(StoreError, match=r"What this site remembers of the run, .* cannot be read"):
        memory.after((0, 0))


def test_of_other_runs_only_the_latest_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for run in range(8):
        SiteMemory(tmp_path / f"{run:016x}", keep=3).keep((0, 0), {"control": torch.zeros(1)})
    assert (tmp_path / "notes").exists()
    assert len(list(tmp_path.rglob("*.safetensors"))) == KEPT_RUNS
