"""Sites that are away, fail, lie or come back: the others go on, and the log says who and why."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedkeel.core.messages import update_from_bytes, update_to_bytes
from fedkeel.engine.executors.sites.channel import STEPS, Reply, Table
from fedkeel.errors import FedkeelError, TrainingError
from fedkeel.experiments.comparison import collect_runs
from fedkeel.runs.run import Run
from tests import tiny
from tests.deploy.loop import Loop, in_one_process, over_network, sites_of
from tests.engine.executors.sites.test_executor import assert_same
from tests.trust.test_privacy import needs_opacus

pytestmark = pytest.mark.slow

WARD, CLINIC, HOSPITAL = "ward", "clinic", "hospital"
Spoil = Callable[[Reply], "Reply | str"]


def loop_of(directory: Path, **options: Any) -> Loop:
    return Loop(sites_of(tiny.federation(**options), directory / "sites", tiny.model()))


def spoiling(loop: Loop, do: str, spoil: Spoil, *, node: str = CLINIC, round: int = 1) -> Loop:
    """Change what one site replies to one request of one round."""

    def change(at: str, request: Table, reply: Reply) -> Reply | str:
        hit = at == node and request["do"] == do and request["step"] // STEPS == round
        return spoil(reply) if hit else reply

    loop.spoil = change
    return loop


def swallow(_: Reply) -> Reply:
    raise TimeoutError


def changed(**changes: Any) -> Spoil:
    def spoil(reply: Reply) -> Reply:
        return reply[0], update_to_bytes(replace(update_from_bytes(reply[1]), **changes))

    return spoil


BAD_UPDATES: dict[str, tuple[Spoil, str]] = {
    "none": (swallow, "it did not reply within 3600 s"),
    "an error": (lambda _: "it failed (no memory)", "it failed (no memory)"),
    "a failure": (lambda _: ({"failure": "its loss became nan"}, b""), "its loss became nan"),
    "random bytes": (lambda _: ({}, bytes(range(256)) * 40), "it cannot be read"),
    "far too much": (lambda reply: (reply[0], reply[1] + bytes(5 * 2**20)), "bytes, more than 4,2"),
    "another's": (changed(client="ward"), "it is signed 'ward'"),
    "an old one": (changed(round=0), "it is of round 1, not of round 2"),
    "too many samples": (changed(samples=2**50), f"its number of samples is {2**50}"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("spoil", "reason"), BAD_UPDATES.values(), ids=list(BAD_UPDATES))
def test_a_bad_update_is_as_if_it_had_not_come(tmp_path: Path, spoil: Spoil, reason: str) -> None:
    notes = tiny.Notes()
    loop = spoiling(loop_of(tmp_path / "a"), "train", spoil)
    run = over_network(tmp_path / "a", loop=loop, observer=notes)
    (dropped,) = run.records("dropped")
    assert (dropped["round"], dropped["client"]) == (1, "clinic")
    assert reason in dropped["reason"]
    assert any("'clinic'" in note and reason in note for note in notes.notes)
    away = over_network(tmp_path / "b", loop=spoiling(loop_of(tmp_path / "b"), "train", swallow))
    assert (run.directory / "model.safetensors").read_bytes() == (away.directory / "model.safetensors").read_bytes()


def test_a_site_that_is_away_is_missing_and_takes_part_again_when_it_is_back(tmp_path: Path) -> None:
    loop, notes = loop_of(tmp_path), tiny.Notes()

    def leave_and_return(round: int) -> None:
        loop.away = {CLINIC} if round == 0 else set()

    notes._after = leave_and_return
    run = over_network(tmp_path, loop=loop, observer=notes, rounds=4)
    assert [record["round"] for record in run.records("dropped")] == [1]
    assert run.records("dropped")[0]["reason"] == "it is not connected"
    assert [r["round"] for r in run.records("client") if r["client"] == "clinic"] == [0, 2, 3]


def test_a_site_that_hangs_is_waited_for_once_in_a_round(tmp_path: Path) -> None:
    loop, notes = spoiling(loop_of(tmp_path), "train", swallow), tiny.Notes()
    run = over_network(tmp_path, "hbn", loop=loop, observer=notes)
    asked = [(r["step"] // STEPS, r["do"]) for node, r in loop.requests if node == CLINIC and r["do"] != "describe"]
    assert asked == [
        (0, "train"),
        (0, "answer"),
        (0, "evaluate"),
        (1, "train"),
        *[(2, d) for d in ("train", "answer", "evaluate", "evaluate")],  # the last: in detail
    ]
    assert "Round 2: 'clinic' did not evaluate, it did not reply to an earlier request of this round." in notes.notes
    assert [record["round"] for record in run.records("client") if record["client"] == "clinic"] == [0, 2]


def test_a_restarted_site_is_known_by_its_name_and_remembers(tmp_path: Path) -> None:
    loop = loop_of(tmp_path / "sites")

    def restart(_: int) -> None:
        loop.at[CLINIC] = sites_of(tiny.federation(), tmp_path / "sites" / "sites", tiny.model())[CLINIC]

    run = over_network(tmp_path / "sites", "scaffold+fedbn", loop=loop, observer=tiny.Notes(restart))
    assert_same(run, in_one_process(tmp_path / "serial", "scaffold+fedbn"))


def test_a_resumed_server_finds_what_sites_remembered_at_its_checkpoint(tmp_path: Path) -> None:
    """The sites had gone two rounds further than the checkpoint."""
    loop = loop_of(tmp_path / "network")
    options = {"rounds": 5, "checkpoint_every": 2}

    def die(round: int) -> None:
        if round == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        over_network(tmp_path / "network", "scaffold+fedbn", loop=loop, observer=tiny.Notes(die), **options)
    checkpoints = sorted((tmp_path / "network/run/checkpoints").iterdir())
    for file in checkpoints[-1].iterdir():  # the last one is damaged: the server goes back to the one before it
        file.write_bytes(b"")
    run = over_network(tmp_path / "network", "scaffold+fedbn", loop=loop, **options)
    assert_same(run, in_one_process(tmp_path / "serial", "scaffold+fedbn", **options))


def test_a_site_cannot_pose_as_another(tmp_path: Path) -> None:
    loop, notes = loop_of(tmp_path), tiny.Notes()
    loop.at["pharmacy"] = loop.at.pop(CLINIC)
    run = over_network(tmp_path, loop=loop, observer=notes)
    assert {record["client"] for record in run.records("client")} == {"ward", "hospital"}
    assert "The site 'pharmacy' sits out: it calls itself 'clinic', and its kit is 'pharmacy'." in notes.notes


def test_a_late_site_takes_part_from_the_next_start_on(tmp_path: Path) -> None:
    def end(round: int) -> None:
        if round == 0:
            raise KeyboardInterrupt

    loop = loop_of(tmp_path / "late")
    late = {CLINIC: loop.at.pop(CLINIC)}
    with pytest.raises(KeyboardInterrupt):
        over_network(tmp_path / "late", "fedbn", loop=loop, observer=tiny.Notes(end))
    loop.at |= late
    run = over_network(tmp_path / "late", "fedbn", loop=loop)
    assert [(r["round"], r["client"]) for r in run.records("client")] == [
        (0, "hospital"), (0, "ward"), (1, "clinic"), (1, "hospital"), (1, "ward"), (2, "clinic"), (2, "hospital"),
        (2, "ward"),
    ]  # fmt: skip
    tested = [r["client"] for r in run.records("evaluation") if r["split"] == "test" and r["statistics"] == "global"]
    assert tested == ["hospital", "ward", *["clinic", "hospital", "ward"] * 2]
    # The model is that of a federation which knew it from the beginning and missed it in its first round.
    missing = spoiling(loop_of(tmp_path / "missing"), "train", swallow, round=0)
    wanted = over_network(tmp_path / "missing", "fedbn", loop=missing)
    assert (run.directory / "model.safetensors").read_bytes() == (wanted.directory / "model.safetensors").read_bytes()


def test_a_site_that_sits_out_is_told_of_once(tmp_path: Path) -> None:
    on = tiny.federation()
    odd = replace(on, classes=("dot", "bar", "cross", "fame"))
    loop, notes = loop_of(tmp_path), tiny.Notes()
    loop.at[CLINIC] = sites_of(odd, tmp_path / "sites", tiny.model())[CLINIC]
    run = over_network(tmp_path, loop=loop, observer=notes)
    assert {record["client"] for record in run.records("client")} == {"ward", "hospital"}
    told = [note for note in notes.notes if "sits out" in note]
    assert told == ["The site 'clinic' sits out: it has the class 'fame' that the others have not."]
    assert [request["do"] for node, request in loop.requests if node == CLINIC] == ["describe", "sit out"]


@pytest.mark.slow
def test_a_round_waits_for_as_many_sites_as_it_needs(tmp_path: Path) -> None:
    loop, notes = loop_of(tmp_path), tiny.Notes()
    looks = 0
    sites = loop.sites

    def coming_back() -> list[str]:
        nonlocal looks
        looks += bool(loop.away)
        if looks > 2:
            loop.away = set()
        return sites()

    loop.sites = coming_back  # type: ignore[method-assign]
    notes._after = lambda round: loop.away.update({WARD, CLINIC} if round == 0 else ())
    run = over_network(tmp_path, loop=loop, observer=notes, min_clients=3)
    assert run.records("dropped") == []
    assert "1 sites are connected, and 3 are needed: waiting for clinic, ward." in notes.notes


def test_a_run_stops_when_no_site_has_an_update_and_goes_on_later(tmp_path: Path) -> None:
    loop = loop_of(tmp_path / "network")
    usual = loop.spoil
    loop.spoil = lambda _, request, reply: reply if request.get("step", 0) < STEPS else "its power is cut"
    with pytest.raises(TrainingError, match="its power is cut"):
        over_network(tmp_path / "network", loop=loop)
    loop.spoil = usual
    assert_same(over_network(tmp_path / "network", loop=loop), in_one_process(tmp_path / "serial"))


def test_no_pixel_and_no_list_of_labels_leaves_a_site(tmp_path: Path) -> None:
    loop, federation = loop_of(tmp_path), tiny.federation()
    over_network(tmp_path, "fedcoda", loop=loop)
    carried = b"".join(loop.carried)
    for image in federation.images:
        assert image.numpy().tobytes() not in carried
        assert (image.float() / 255).numpy().tobytes() not in carried
    for client in federation.clients:
        labels = federation.labels[client.train]
        for kind in (torch.int64, torch.int32, torch.uint8, torch.float32):
            assert labels.to(kind).numpy().tobytes() not in carried
        assert str(labels.tolist()).encode() not in carried


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("central", {}, "stay where they are"),
        ("hbn", {"robust": "median"}, "'hbn' makes the global model otherwise than from the clients' mean"),
        ("fedavg", {"robust": "mediam"}, "did you mean 'median'"),
        pytest.param("fedavg", {"dp": "central"}, "give '--weighting uniform'", marks=needs_opacus),
        pytest.param("fedprox", {"dp": "local"}, "'fedprox' computes or sends something else", marks=needs_opacus),
    ],
)
def test_what_cannot_go_together_is_refused_before_any_site_is_waited_for(
    tmp_path: Path, method: str, options: dict[str, Any], said: str
) -> None:
    loop = loop_of(tmp_path)
    with pytest.raises(FedkeelError, match=said):
        over_network(tmp_path, method, loop=loop, **options)
    assert loop.requests == []


def test_another_configuration_does_not_go_on_with_a_run(tmp_path: Path) -> None:
    over_network(tmp_path)
    assert isinstance(over_network(tmp_path), Run)
    with pytest.raises(FedkeelError, match="another configuration"):
        over_network(tmp_path, rounds=4)
    assert over_network(tmp_path, round_timeout=5.0).finished


def test_a_site_without_test_images_is_in_the_table_with_a_dash(tmp_path: Path) -> None:
    federation = tiny.federation()
    empty = torch.empty(0, dtype=torch.int64)
    clients = [replace(c, test=empty) if c.name == "clinic" else c for c in federation.clients]
    run = over_network(tmp_path, on=replace(federation, clients=clients), rounds=1)
    results = collect_runs([run.directory]).results
    assert results.cells(results.rows[0])[results.domains.index("dark")] is None
    assert "Not tested, –: dark." in results.text()
