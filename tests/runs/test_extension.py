"""A finished run that is extended is, bit by bit, a run of so many rounds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedkeel
from fedkeel.cli import main
from fedkeel.core.client import LocalClient
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.errors import FedkeelError
from fedkeel.runs.extension import FILE
from fedkeel.runs.store import checkpoints
from fedkeel.stopping import Stopped
from tests import tiny


def extend(directory: Path, rounds: int, **options: Any) -> fedkeel.Run:
    objects = {"federation": tiny.federation(), "model": tiny.model(), **options}
    return fedkeel.resume(directory, rounds=rounds, **objects)


class Shifted(Method):
    """Tests another model than it trains on, and counts how often in the server's memory and extras."""

    name = "shifted"
    traits = Traits()

    def before_evaluation(self, server: Server) -> None:
        server.weights = {name: tensor + 0.5 for name, tensor in server.weights.items()}
        server.extras = {"tests": server.extras.get("tests", torch.zeros(())) + 1}


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedavg", {}),
        ("hbn", {}),
        ("scaffold", {"participation": 0.7}),
        ("fedbn", {"result": "best-validation"}),
        ("fedavgm", {"schedule": "step(every=2)", "optimizer": "adam"}),
        ("fedadam", {"schedule": "warmup(rounds=2, then=exponential)"}),
        (Shifted, {}),
    ],
)
@pytest.mark.slow
def test_it_is_the_run_of_so_many_rounds(
    method: str | Callable[[], Method], options: dict[str, Any], tmp_path: Path
) -> None:
    def made() -> str | Method:
        return method if isinstance(method, str) else method()

    objects = {} if isinstance(method, str) else {"method": method()}
    tiny.run(tmp_path / "short", made(), rounds=2, **options)
    extended = extend(tmp_path / "short", 5, **objects)
    whole = tiny.run(tmp_path / "whole", made(), rounds=5, **options)
    assert tiny.result(extended) == tiny.result(whole)
    assert extended.config == whole.config
    assert extended.summary is not None
    assert whole.summary is not None
    assert extended.summary["extended"] == [2]
    unequal = {"seconds", "extended"}
    for name in whole.summary.keys() - unequal:
        assert extended.summary[name] == whole.summary[name]


@pytest.mark.slow
def test_it_can_be_extended_again_and_killed_on_the_way(tmp_path: Path) -> None:
    def stop(round: int) -> None:
        if round == 3:
            raise Stopped

    tiny.run(tmp_path / "run", "hbn", rounds=2)
    with pytest.raises(Stopped):
        extend(tmp_path / "run", 5, observer=tiny.Notes(stop))
    assert not fedkeel.Run(tmp_path / "run").finished
    with pytest.raises(FedkeelError, match=r"is not finished: first 'fedkeel resume .*', then add rounds"):
        extend(tmp_path / "run", 6)
    tiny.resume(tmp_path / "run")
    run = extend(tmp_path / "run", 6)
    assert tiny.result(run) == tiny.result(tiny.run(tmp_path / "whole", "hbn", rounds=6))
    assert run.summary is not None
    assert run.summary["extended"] == [2, 5]


@pytest.mark.slow
@pytest.mark.parametrize("done", [[], [FILE], [FILE, "config.toml"]])
def test_what_is_killed_before_it_trains_can_be_asked_for_again(done: list[str], tmp_path: Path) -> None:
    before = tiny.run(tmp_path / "run", rounds=2).directory
    kept = tmp_path / "kept"
    shutil.copytree(before, kept)
    extend(before, 4)
    (kept / "summary.json").unlink()
    for name in done:
        shutil.copy(before / name, kept)
    run = tiny.resume(kept)
    run = run if run.rounds_done == 4 else extend(kept, 4)
    assert tiny.result(run) == tiny.result(fedkeel.Run(before))
    assert run.summary is not None
    assert run.summary["extended"] == [2]


@pytest.mark.slow
def test_a_damaged_checkpoint_costs_a_round_and_changes_nothing(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", rounds=3)
    (checkpoints(run.directory)[-1] / "server.safetensors").write_bytes(b"")
    seen = tiny.Notes()
    extended = extend(run.directory, 5, observer=seen)
    assert seen.rounds == [2, 3, 4]
    assert tiny.result(extended) == tiny.result(tiny.run(tmp_path / "whole", rounds=5))


def test_a_run_that_stopped_early_gets_new_patience(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny.run(tmp_path / "run", min_delta=1.0, rounds=9, patience=2)
    assert run.rounds_done == 3
    run = extend(run.directory, 9)
    assert run.rounds_done == 5
    assert main(["show", str(run.directory)]) == 0
    shown = capsys.readouterr().out
    assert "Stopped after round 5 of 9" in shown
    assert "Extended after round 3." in shown
    assert extend(run.directory, 6).rounds_done == 6


def test_killed_after_its_patience_was_renewed_it_waits_as_long(tmp_path: Path) -> None:
    def stop(round: int) -> None:
        if round == 3:
            raise Stopped

    tiny.run(tmp_path / "run", min_delta=1.0, rounds=9, patience=2)
    with pytest.raises(Stopped):
        extend(tmp_path / "run", 9, observer=tiny.Notes(stop))
    assert tiny.resume(tmp_path / "run").rounds_done == 5


class Late(Method):
    """Goes by the number of rounds."""

    name = "late"

    def start(self, client: LocalClient) -> None:
        if client.round > client.rounds / 2:
            client.memory["late"] = torch.ones(1)


class LateInside(Method):
    """The same in a function inside."""

    name = "late"

    def start(self, client: LocalClient) -> None:
        if any(client.round > client.rounds / part for part in (2, 3)):
            client.memory["late"] = torch.ones(1)


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        ("fedavg", {"schedule": "cosine"}, "What the schedule 'cosine' does depends on the number of rounds"),
        ("fedavg", {"schedule": "warmup(rounds=1, then=cosine)"}, "depends on the number of rounds, which was 3"),
        ("fixbn", {}, "What the method 'fixbn' does depends on the number of rounds, which was 3: train anew with"),
        ("fedprox+fedcoda", {}, "the method 'fedcoda'"),
        ("ga", {}, "the method 'ga'"),
        ("fedfm", {}, "the method 'fedfm'"),
        (Late(), {}, "the method 'late'"),
        (LateInside(), {}, "the method 'late'"),
    ],
)
def test_what_goes_by_the_number_of_rounds_is_refused_and_the_run_stays(
    method: str | Method, options: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    run = tiny.run(tmp_path / "run", method, **options)
    objects = {} if isinstance(method, str) else {"method": type(method)()}
    with pytest.raises(FedkeelError) as refused:
        extend(run.directory, 5, **objects)
    assert sentence in str(refused.value)
    assert fedkeel.Run(run.directory).finished
    assert not (run.directory / FILE).exists()


def test_one_that_stopped_early_goes_on_to_where_it_was_planned_whatever_it_goes_by(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run", schedule="cosine", min_delta=1.0, rounds=6, patience=2)
    assert run.rounds_done == 3
    assert extend(run.directory, 6).rounds_done > 3


def test_what_cannot_be_extended_is_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny.run(tmp_path / "run", rounds=3)
    with pytest.raises(FedkeelError, match="has had 3 rounds, and 'rounds' is 3: give more"):
        extend(run.directory, 3)
    with pytest.raises(FedkeelError, match="'rounds' is 'ten', which is not a whole number"):
        extend(run.directory, "ten")  # type: ignore[arg-type]
    with pytest.raises(FedkeelError, match="'learning_rate' cannot change when a run is resumed"):
        extend(run.directory, 5, learning_rate=0.1)
    with pytest.raises(FedkeelError, match=r"The data of .* was given in Python.*give it again, federation="):
        fedkeel.resume(run.directory, rounds=5, model=tiny.model())
    with pytest.raises(FedkeelError, match="is not a run directory"):
        extend(tmp_path, 5)
    for arguments, sentence in (
        ([str(run.directory), "--rounds", "few"], "'rounds' is 'few': give a whole number"),
        ([str(run.directory), "--rounds", "2"], "give more"),
    ):
        assert main(["resume", *arguments]) == 2
        assert sentence in capsys.readouterr().err
    shutil.rmtree(run.directory / "checkpoints")
    with pytest.raises(FedkeelError, match="has no checkpoint that is whole"):
        extend(run.directory, 5)
    assert fedkeel.Run(run.directory).finished


def test_other_data_are_refused_and_the_run_stays(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "run")
    with pytest.raises(FedkeelError):
        extend(run.directory, 5, federation=tiny.federation(seed=1))
    assert fedkeel.Run(run.directory).finished


def test_the_directory_says_that_it_was_extended(tmp_path: Path) -> None:
    tiny.run(tmp_path / "run", rounds=2)
    run = extend(tmp_path / "run", 4)
    assert run.config.rounds == 4
    assert json.loads((run.directory / FILE).read_text())["extended"] == {"2": 2}
