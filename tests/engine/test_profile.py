"""Where the time went: the clocks on made-up time, and the profile of real, tiny runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fedkeel.cli import main
from fedkeel.config import Config
from fedkeel.engine import profile, stopwatch
from fedkeel.engine.local import Worker
from fedkeel.engine.stopwatch import Stopwatch
from fedkeel.runs.run import Run
from fedkeel.runs.store import fingerprint
from fedkeel.stopping import Stopped, stop_requested
from tests import tiny

STEPS = {"ward": 4, "clinic": 3, "hospital": 6}  # batches of four of 14, 9 and 21 samples


class Time:
    """A clock that moves only when told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr("fedkeel.engine.stopwatch.time.perf_counter", lambda: self.now)

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


# -- clocks ----------------------------------------------------------------------------------------------------------
def test_a_phase_inside_another_is_taken_out_of_it(time: Time) -> None:
    clock = Stopwatch()
    with clock("outer"):
        time.passes(1)
        with clock("middle"):
            time.passes(2)
            with clock("inner"):
                time.passes(4)
        with clock("inner"):
            time.passes(8)
        time.passes(16)
    spent = clock.take()
    assert {name: (s["seconds"], s["calls"]) for name, s in spent.items()} == {
        "outer": (17, 1),
        "middle": (2, 1),
        "inner": (12, 2),
    }
    assert clock.take() == {}


def test_a_phase_ends_when_the_gpu_is_done_and_says_how_long_that_was_waited_for(time: Time) -> None:
    clock = Stopwatch(synchronize=lambda: time.passes(5))
    with clock("outer"):
        time.passes(1)
        with clock("inner"):
            time.passes(2)
    spent = clock.take()
    assert (spent["inner"]["seconds"], spent["inner"]["waiting"]) == (7, 5)
    assert (spent["outer"]["seconds"], spent["outer"]["waiting"]) == (6, 5)


def test_of_a_loop_only_the_wait_for_the_next_item_counts(time: Time) -> None:
    clock = Stopwatch()

    def clients() -> Any:
        for name in "ab":
            time.passes(3)
            yield name
        time.passes(1)

    seen = []
    for name in clock.over("training", clients()):
        time.passes(100)
        seen.append(name)
    spent = clock.take()["training"]
    assert seen == ["a", "b"]
    assert (spent["seconds"], spent["calls"]) == (7, 1)


def test_a_phase_that_fails_is_closed(time: Time) -> None:
    clock = Stopwatch()

    def fail() -> None:
        with clock("outer"), clock("inner"):
            time.passes(1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    with clock("after"):
        time.passes(2)
    assert {name: s["seconds"] for name, s in clock.take().items()} == {"outer": 0, "inner": 1, "after": 2}


def test_what_workers_spent_is_added_up(time: Time) -> None:
    clock, worker = Stopwatch(), Stopwatch()
    for _ in range(3):
        with worker("loading"):
            time.passes(1)
            with worker("batches"):
                time.passes(2)
        clock.add(worker.take())
    spent = clock.take()
    assert {name: (s["seconds"], s["calls"]) for name, s in spent.items()} == {"loading": (3, 3), "batches": (6, 3)}
    assert clock.take() == {}


# -- runs ------------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "processes"])
@pytest.mark.parametrize("method", ["fedavg", "hbn", "greg+fedprox(mu=0.1)"])
def test_profiling_changes_no_bit_of_the_result(tmp_path: Path, executor: str, method: str) -> None:
    options: dict[str, Any] = {**tiny.by(executor), "rounds": 2}
    plain = tiny.run(tmp_path / "plain", method, **options)
    profiled = tiny.run(tmp_path / "profiled", method, **options, profile=True)
    assert tiny.result(profiled) == tiny.result(plain)


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_every_step_of_every_client_is_counted_wherever_it_ran(tmp_path: Path, executor: str) -> None:
    run = tiny.run(tmp_path / "run", "hbn", **tiny.by(executor), profile=True)
    document = run.profile
    assert document is not None
    assert [entry["round"] for entry in document["rounds"]] == [0, 1, 2]
    for entry in document["rounds"]:
        clients = {name: spent["calls"] for name, spent in entry["clients"].items()}
        assert clients["forward and backward"] == clients["optimiser"] == sum(STEPS.values())
        assert clients["start"] == clients["finish"] == clients["batches"] == len(STEPS)
        assert clients["answering"] == len(STEPS)  # hbn asks each client for its statistics before the evaluation
        assert all(spent["seconds"] > 0 for spent in entry["clients"].values())
    totals = {name: spent["calls"] for name, spent in document["total"]["clients"].items()}
    assert totals["optimiser"] == 3 * sum(STEPS.values())


def test_the_phases_of_a_round_add_up_to_its_wall_clock(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", "hbn", profile=True)
    document = run.profile
    assert document is not None
    for entry in document["rounds"]:
        assert sum(spent["seconds"] for spent in entry["phases"].values()) == pytest.approx(entry["seconds"], abs=1e-4)
        # In one process the clients' parts are inside the server's phases.
        training = ("loading", "start", "batches", "forward and backward", "optimiser", "finish")
        parts = sum(entry["clients"][name]["seconds"] for name in training)
        waiting = entry["phases"]["local training"]["seconds"] + entry["phases"]["extra exchanges"]["seconds"]
        assert parts <= waiting + 1e-4
        assert parts > 0.5 * entry["phases"]["local training"]["seconds"]
    calls = {name: spent["calls"] for name, spent in document["total"]["phases"].items()}
    assert set(calls) == set(stopwatch.PHASES)
    for name in ("sampling", "broadcast", "local training", "aggregation", "evaluation", "checkpoint"):
        assert calls[name] == 3, name
    assert calls["reading data"] == calls["set-up"] == 1
    assert calls["recording"] == len(run.records())
    before = sum(spent["seconds"] for spent in document["set_up"].values())
    rounds = sum(entry["seconds"] for entry in document["rounds"])
    assert document["total"]["seconds"] == pytest.approx(before + rounds, abs=1e-3)


def test_a_run_that_nobody_asked_to_profile_has_no_clock(tmp_path: Path) -> None:
    assert type(tiny.setup().worker) is Worker
    run = tiny.run(tmp_path / "run")
    assert run.profile is None
    assert not (run.directory / "profile.json").exists()


def test_rounds_without_evaluation_have_no_time_for_it(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", profile=True, evaluate_every=2, rounds=4, checkpoint_every=4)
    assert run.profile is not None
    evaluated = [entry["round"] for entry in run.profile["rounds"] if "evaluation" in entry["phases"]]
    stored = [entry["round"] for entry in run.profile["rounds"] if "checkpoint" in entry["phases"]]
    assert (evaluated, stored) == ([1, 3], [3])


def stopped_in_round(path: Path, number: int, **options: Any) -> Run:
    """A run that is asked to stop after this round, and does so in the middle of the next."""
    try:
        with pytest.raises(Stopped):
            tiny.run(
                path,
                "fedbn",
                rounds=5,
                profile=True,
                observer=tiny.Notes(lambda round: stop_requested.set() if round == number else None),
                **options,
            )
    finally:
        stop_requested.clear()
    return Run(path)


def test_a_resumed_run_goes_on_with_its_profile(tmp_path: Path) -> None:
    run = stopped_in_round(tmp_path / "run", 2, checkpoint_every=2)
    earlier = run.profile
    assert earlier is not None
    assert [entry["round"] for entry in earlier["rounds"]] == [0, 1, 2]
    document = tiny.resume(run.directory).profile
    assert document is not None
    # Round 2 was not in a checkpoint, so it was done again.
    assert [entry["round"] for entry in document["rounds"]] == [0, 1, 2, 3, 4]
    assert document["rounds"][:2] == earlier["rounds"][:2]
    assert document["rounds"][2] != earlier["rounds"][2]
    assert document["starts"] == 2
    assert document["set_up"]["set-up"]["calls"] == 2
    assert document["total"]["phases"]["local training"]["calls"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "{", "[]", '{"rounds": [{}]}'])
def test_a_damaged_profile_does_not_stop_a_run_from_going_on(tmp_path: Path, text: str) -> None:
    run = stopped_in_round(tmp_path / "run", 1)
    (run.directory / "profile.json").write_text(text)
    document = tiny.resume(run.directory).profile
    assert document is not None
    assert [entry["round"] for entry in document["rounds"]] == [2, 3, 4]


def test_a_profiled_run_is_the_same_run() -> None:
    assert fingerprint(Config(profile=True)) == fingerprint(Config())


# -- what a person sees ----------------------------------------------------------------------------------------------
TINY = ["--subsample", "10", "--model", "simple_cnn(width=2)", "--device", "cpu", "--rounds", "2", "--quiet"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("executor", "sentence"),
    [
        ("serial", "Seconds of this process, one client after another."),
        ("processes", "Worker-seconds, added up over 2 worker processes that run at the same time."),
    ],
)
def test_the_command_prints_the_table_and_show_prints_it_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], executor: str, sentence: str
) -> None:
    directory = str(tmp_path / "run")
    workers = ["--workers", "2"] if executor == "processes" else []
    assert main(["run", "--profile", "--executor", executor, *workers, "--out", directory, *TINY]) == 0
    printed = capsys.readouterr().out
    assert "s went, 2 rounds" in printed
    for name in ("reading data", "local training", "aggregation", "forward and backward", sentence):
        assert name in printed
    assert main(["show", directory]) == 0
    assert capsys.readouterr().out.startswith(printed)  # then what was remarked at the end of the run
    assert main(["show", directory, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["profile"] == Run(directory).profile


def test_shares_and_waiting_are_told_as_they_are() -> None:
    spent = {"seconds": 3.0, "waiting": 2.5, "calls": 4}
    rest = {"seconds": 1.0, "waiting": 0.0, "calls": 2}
    document = {
        "executor": "cuda",
        "device": "cuda:0",
        "workers": 1,
        "set_up": {"set-up": rest},
        "rounds": [{}, {}],
        "total": {
            "seconds": 4.0,
            "phases": {"set-up": rest, "local training": spent},
            "clients": {"start": rest, "waiting for the GPU": spent},
        },
    }
    assert profile.phase_rows(document) == [
        ("set-up", "1.00", "25.0", "-", "2", "0.00"),
        ("local training", "3.00", "75.0", "1500.0", "4", "2.50"),
    ]
    assert profile.client_rows(document)[1] == ("waiting for the GPU", "3.00", "75.0", "4", "2.50")
    assert "Seconds of the host" in profile.client_caption(document)


# -- the seconds that every run is told --------------------------------------------------------------------------------
def test_a_run_with_a_profile_and_one_without_tell_the_same_parts(tmp_path: Path) -> None:
    for options in ({}, {"profile": True}):
        run = tiny.run(tmp_path / f"run{len(options)}", **options)
        lines = [json.loads(line) for line in (run.directory / "timing.jsonl").read_text().splitlines()]
        assert [line["round"] for line in lines] == [0, 1, 2]
        assert all(line[part] > 0 for line in lines for part in ("train", "aggregate", "evaluate"))
        document = run.profile
        for line, entry in zip(lines, document["rounds"] if document else [], strict=document is not None):
            assert sum(line[part] for part in ("train", "aggregate", "evaluate")) <= entry["seconds"] + 1e-5
            spent = {name: phase["seconds"] for name, phase in entry["phases"].items()}
            until_updates = ("sampling", "broadcast", "local training", "collection and checks")
            assert line["train"] >= sum(spent[name] for name in until_updates) - 1e-5
            assert line["aggregate"] >= spent["aggregation"] - 1e-5
