"""What sites remember: of a round that does not count, nothing; otherwise as in one process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fedkeel.core.messages import BadMessage
from fedkeel.deploy.memory import KEPT_RUNS, SiteMemory
from fedkeel.engine.executors.sites.channel import Reply
from fedkeel.engine.local import Worker
from fedkeel.errors import StoreError
from tests import tiny
from tests.deploy.loop import over_network
from tests.deploy.test_faults import CLINIC, changed, loop_of, spoiling, swallow
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


def files(directory: Path, site: str) -> list[str]:
    return sorted(path.stem for path in (directory / "sites" / site).rglob("*.safetensors"))


@pytest.mark.usefixtures("bad_update")
def test_a_site_whose_update_is_dropped_remembers_what_it_did_before(tmp_path: Path) -> None:
    run = over_network(tmp_path / "flower", METHOD, rounds=4)
    assert [(r["round"], r["client"]) for r in run.records("dropped")] == [(1, "clinic")]
    assert_same(run, tiny.run(tmp_path / "serial", METHOD, rounds=4))


@pytest.mark.usefixtures("bad_update")
def test_a_restarted_server_still_knows_whose_update_was_dropped(tmp_path: Path) -> None:
    """It dies right after the checkpoint of that round; the site thinks that its update counted."""
    loop = loop_of(tmp_path / "flower")

    def die(round: int) -> None:
        if round == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        over_network(tmp_path / "flower", METHOD, loop=loop, observer=tiny.Notes(die), rounds=4)
    run = over_network(tmp_path / "flower", METHOD, loop=loop, rounds=4)
    assert_same(run, tiny.run(tmp_path / "serial", METHOD, rounds=4))


@pytest.mark.parametrize("spoil", [swallow, changed(samples=-1)], ids=["lost on its way", "refused"])
def test_a_reply_that_does_not_count_leaves_no_trace_at_the_site(
    tmp_path: Path, spoil: Callable[[Reply], Reply], request: pytest.FixtureRequest
) -> None:
    loop = spoiling(loop_of(tmp_path / "flower"), "train", spoil)
    run = over_network(tmp_path / "flower", METHOD, loop=loop, rounds=4)
    request.getfixturevalue("bad_update")
    wanted = tiny.run(tmp_path / "serial", METHOD, rounds=4)
    models = [safetensors.torch.load_file(r.directory / "model.safetensors") for r in (run, wanted)]
    torch.testing.assert_close(*models, rtol=1e-5, atol=1e-6)
    ours, theirs = ([e for e in r.records("evaluation") if e["round"] == 3] for r in (run, wanted))
    assert ours == [near(evaluation) for evaluation in theirs]


@pytest.mark.usefixtures("bad_update")
def test_a_round_with_too_few_updates_leaves_no_trace_at_any_site(tmp_path: Path) -> None:
    run = over_network(tmp_path / "flower", METHOD, rounds=4, min_clients=3)
    assert_same(run, tiny.run(tmp_path / "serial", METHOD, rounds=4, min_clients=3))


def test_a_site_that_misses_a_repeated_round_forgets_what_it_did_there_the_first_time(tmp_path: Path) -> None:
    """The server dies in round 2 before the checkpoint; when it repeats the round, the clinic is away."""
    loop = loop_of(tmp_path / "flower")

    def die(round: int) -> None:
        if round == 2:
            raise KeyboardInterrupt

    options = {"rounds": 5, "checkpoint_every": 2}
    with pytest.raises(KeyboardInterrupt):
        over_network(tmp_path / "flower", METHOD, loop=loop, observer=tiny.Notes(die), **options)
    spoiling(loop, "train", swallow, round=2)
    run = over_network(tmp_path / "flower", METHOD, loop=loop, **options)

    never = spoiling(loop_of(tmp_path / "never"), "train", swallow, round=2)
    wanted = over_network(tmp_path / "never", METHOD, loop=never, **options)
    assert_same(run, wanted)


def test_an_update_that_krum_does_not_choose_leaves_no_trace_at_its_site(tmp_path: Path) -> None:
    options = {"robust": "krum(liars=0)", "rounds": 4}
    run = over_network(tmp_path / "flower", METHOD, **options)
    assert len(run.records("not chosen")) == 2 * 4
    assert_same(run, tiny.run(tmp_path / "serial", METHOD, **options))


def test_a_request_that_was_overtaken_changes_nothing(tmp_path: Path) -> None:
    loop = loop_of(tmp_path)
    site, sent = loop.at[CLINIC], []
    usual = site.reply

    def record(request: Any, message: bytes) -> Reply:
        sent.append((request, message))
        return usual(request, message)

    site.reply = record  # type: ignore[method-assign]
    over_network(tmp_path, METHOD, loop=loop)
    before = files(tmp_path, "clinic")
    old = next(item for item in sent if item[0]["do"] == "train" and item[0]["step"][0] == 1)
    assert "overtaken" in usual(*old)[0]["failure"]
    assert files(tmp_path, "clinic") == before
    latest = [item for item in sent if item[0]["do"] == "evaluate"][-1]
    assert "failure" not in usual(*latest)[0]  # delivered twice: it is answered twice


def test_memory_after_a_step_is_that_of_the_last_one_that_counts(tmp_path: Path) -> None:
    memory = SiteMemory(tmp_path, "run", keep=10)
    assert memory.after(None) == {}
    for round in range(4):
        memory.keep((round, 0), {"x": torch.tensor(float(round))})
    assert memory.after((2, 0))["x"] == 2
    assert memory.after((3, 0))["x"] == 2, "what came later was forgotten"
    assert memory.after((1, 7))["x"] == 1
    assert memory.after(None) == {}
    assert memory.after((3, 0)) == {}


def test_a_memory_that_counts_outlives_any_number_of_rounds_that_do_not(tmp_path: Path) -> None:
    memory = SiteMemory(tmp_path, "run", keep=2)
    memory.keep((0, 0), {"x": torch.tensor(7.0)})
    for round in range(1, 9):
        assert memory.after((0, 0))["x"] == 7
        memory.keep((round, 0), {"x": torch.tensor(float(round))})
    for round in range(9, 20):
        assert memory.after((round - 1, 0))["x"] == round - 1
        memory.keep((round, 0), {"x": torch.tensor(float(round))})
    assert len(list(tmp_path.rglob("*.safetensors"))) <= 3 + 1


def test_a_run_cannot_name_another_folder(tmp_path: Path) -> None:
    with pytest.raises(BadMessage):
        SiteMemory(tmp_path, "../elsewhere", keep=2)


def test_a_memory_that_was_changed_is_not_used(tmp_path: Path) -> None:
    """Whichever bit it is: the site says so, and blames neither the server nor its message."""
    memory = SiteMemory(tmp_path, "r1", keep=3)
    memory.keep((0, 0), {"control": torch.arange(6.0), "number": torch.tensor(3)})
    (file,) = tmp_path.rglob("*.safetensors")
    written = file.read_bytes()
    assert memory.after((0, 0))["control"].tolist() == [0, 1, 2, 3, 4, 5]
    for bit in range(0, 8 * len(written), 29):
        damaged = bytearray(written)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        with suppress(StoreError):  # or a blank of the header became another
            read = memory.after((0, 0))
            assert {name: t.tolist() for name, t in read.items()} == {"control": [0, 1, 2, 3, 4, 5], "number": 3}
    file.write_bytes(written[:50])
    with pytest.raises(StoreError, match="was changed since it was written"):
        memory.after((0, 0))


def test_of_other_runs_only_memories_are_forgotten(tmp_path: Path) -> None:
    """Whoever keeps anything else in that folder would lose it to a server that starts a few runs."""
    for name in ("images", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "images" / "scan.png").write_bytes(b"an image")
    for run in range(8):
        SiteMemory(tmp_path, f"r{run}", keep=3).keep((0, 0), {"control": torch.zeros(1)})
    assert (tmp_path / "images" / "scan.png").exists()
    assert (tmp_path / "notes").exists()
    assert len(list(tmp_path.rglob("*.safetensors"))) == KEPT_RUNS
