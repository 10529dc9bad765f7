"""What sites remember: of a round that does not count, nothing; otherwise as in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeel.deploy.site_models import KEPT_RUNS
from fedkeel.engine.local import Worker
from fedkeel.runs.store import KEPT_CHECKPOINTS
from tests import tiny
from tests.deploy.loop import in_one_process, over_network
from tests.deploy.test_faults import loop_of, spoiling, swallow
from tests.engine.executors.sites.test_executor import assert_same

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


def test_of_a_run_the_latest_states_are_kept_and_of_other_runs_the_latest(tmp_path: Path) -> None:
    loop = loop_of(tmp_path)
    state = tmp_path / "sites" / "ward"
    (state / "notes").mkdir(parents=True)
    for run in range(KEPT_RUNS + 2):
        over_network(tmp_path / str(run), METHOD, loop=loop, rounds=6)
    assert (state / "notes").exists()
    kept = [folder for folder in state.iterdir() if folder.name != "notes"]
    assert len(kept) == KEPT_RUNS
    assert all(len(list(folder.rglob("*.safetensors"))) == KEPT_CHECKPOINTS + 2 for folder in kept)


def test_a_memory_that_was_cut_is_told_of_and_not_used(tmp_path: Path) -> None:
    loop = loop_of(tmp_path)

    def cut(_: int) -> None:
        for file in (tmp_path / "sites" / "ward").rglob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:50])

    run = over_network(tmp_path, METHOD, loop=loop, observer=tiny.Notes(cut), rounds=2)
    (dropped,) = run.records("dropped")
    assert dropped["client"] == "ward"
    assert "What a client remembers cannot be read from a file or folder of its own" in dropped["reason"]
