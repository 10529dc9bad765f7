"""Trackers: they are told what the run directory says, and without the package it is one sentence."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from fedkeel.cli import main
from fedkeel.core.evaluation import Scores
from fedkeel.errors import FedkeelError
from fedkeel.observer import Observer, Observers
from fedkeel.runs.run import Run
from fedkeel.runs.trackers import mlflow_name, tracked, values
from fedkeel.stopping import Stopped
from tests import tiny


def recorded(run: Run) -> dict[str, list[float]]:
    """By name, what `metrics.jsonl` has for each round."""
    scores = run.scores()
    domains = {f"test/domain/{name}": [entry["domains"][name] for entry in scores] for name in scores[0]["domains"]}
    return {
        "train/loss": [entry["loss"] for entry in run.records("round")],
        "test/accuracy": [entry["average"] for entry in scores],
        "test/accuracy_samples": [entry["samples"] for entry in scores],
        "test/loss": [entry["loss"] for entry in scores],
        **domains,
    }


class Stopping(Observer):
    """Stops the run inside a round, as Ctrl-C would."""

    def __init__(self, inside: int) -> None:
        self.inside = inside

    def client_done(self, round: int, done: int, total: int) -> None:
        if round == self.inside:
            raise Stopped


def run_tracked(name: str, directory: Path, **options: Any) -> Run:
    with tracked(name, directory, Observer()) as observer:
        return tiny.run(directory, observer=observer, **options)


def run_in_two_goes(name: str, directory: Path) -> Run:
    """Stopped in round 3, its last checkpoint after round 1: round 2 is done twice."""
    with pytest.raises(Stopped), tracked(name, directory, Stopping(3)) as observer:
        tiny.run(directory, observer=observer, rounds=5, checkpoint_every=2)
    with tracked(name, directory, Observer()) as observer:
        return tiny.resume(directory, observer=observer)


class TestTensorBoard:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("tensorboard", reason="tensorboard is not installed")

    def read(self, directory: Path) -> dict[str, list[tuple[int, float]]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(directory / "tensorboard"))
        events.Reload()
        return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    @pytest.mark.slow
    def test_it_has_what_the_run_recorded(self, tmp_path: Path) -> None:
        run = run_tracked("tensorboard", tmp_path / "run")
        found = self.read(tmp_path / "run")
        expected = recorded(run)
        assert set(found) == set(expected)
        for name, points in found.items():
            assert [step for step, _ in points] == [1, 2, 3]  # people count them from 1
            assert [value for _, value in points] == pytest.approx(expected[name], rel=1e-6)

    def test_a_resumed_run_goes_on_in_the_same_curves(self, tmp_path: Path) -> None:
        run = run_in_two_goes("tensorboard", tmp_path / "run")
        points = self.read(tmp_path / "run")["train/loss"]
        assert [step for step, _ in points] == [1, 2, 3, 4, 5]
        assert [value for _, value in points] == pytest.approx(recorded(run)["train/loss"], rel=1e-6)


class Stand(types.ModuleType):
    """Stands in for MLflow or W&B, and remembers what it is told: (what, ...)."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)
        self.calls: list[tuple[Any, ...]] = []
        self.lost = False

    def _told(self, *call: Any) -> None:
        if self.lost:
            raise ConnectionError("Connection refused\nmany lines more")
        self.calls.append(call)


class MLflow(Stand):
    def start_run(self, run_id: str | None = None, run_name: str | None = None) -> Any:
        self._told("start", run_id, run_name)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc123"))

    def log_params(self, params: dict[str, Any]) -> None:
        self._told("options", params)

    def set_tag(self, name: str, value: str) -> None:
        assert (name, Path(value).is_dir()) == ("fedkeel.directory", True)

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self._told("values", step, metrics)

    def end_run(self, status: str) -> None:
        self._told("end", status)


class WandB(Stand):
    id = "abc123"

    def init(self, *, project: str, id: str | None, resume: str, name: str, config: Any, dir: str) -> WandB:
        assert (project, resume, Path(dir).is_dir()) == ("fedkeel", "allow", True)
        self._told("start", id, None if id else name)
        self._told("options", config)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self._told("values", step, values)

    def finish(self, exit_code: int) -> None:
        self._told("end", "FINISHED" if exit_code == 0 else "FAILED")


@pytest.fixture(params=["mlflow", "wandb"])
def stand(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Stand:
    made = MLflow("mlflow") if request.param == "mlflow" else WandB("wandb")
    monkeypatch.setitem(sys.modules, request.param, made)
    return made


class TestServers:
    def test_it_is_told_the_options_and_every_round(self, tmp_path: Path, stand: Stand) -> None:
        run = run_tracked(stand.__name__, tmp_path / "run")
        assert [call[0] for call in stand.calls] == ["start", "options", "values", "values", "values", "end"]
        assert stand.calls[0] == ("start", None, "run")
        assert stand.calls[1][1]["learning_rate"] == 0.05
        assert stand.__name__ != "mlflow" or "" not in stand.calls[1][1].values(), "MLflow refuses empty values"
        assert stand.calls[-1] == ("end", "FINISHED")
        for name, expected in recorded(run).items():
            assert [call[2][name] for call in stand.calls if call[0] == "values"] == pytest.approx(expected)
        assert tiny.result(run) == tiny.result(tiny.run(tmp_path / "b"))

    def test_a_resumed_run_goes_on_with_the_run_it_began(self, tmp_path: Path, stand: Stand) -> None:
        run_in_two_goes(stand.__name__, tmp_path / "run")
        starts = [call for call in stand.calls if call[0] == "start"]
        assert starts == [("start", None, "run"), ("start", "abc123", None)]
        assert [call[1] for call in stand.calls if call[0] == "end"][-1] == "FINISHED"

    def test_what_ended_a_run_shows_in_its_state(self, tmp_path: Path, stand: Stand) -> None:
        def crash(_round: int) -> None:
            raise ZeroDivisionError

        with (
            pytest.raises(ZeroDivisionError),
            tracked(stand.__name__, tmp_path / "run", tiny.Notes(crash)) as observer,
        ):
            tiny.run(tmp_path / "run", observer=observer)
        assert stand.calls[-1] == ("end", "FAILED")

    def test_a_server_that_is_lost_costs_the_curves_and_not_the_run(self, tmp_path: Path, stand: Stand) -> None:
        notes = tiny.Notes(lambda _: setattr(stand, "lost", True))
        with tracked(stand.__name__, tmp_path / "run", notes) as observer:
            assert tiny.run(tmp_path / "run", observer=observer).finished
        (note,) = notes.notes
        assert note == f"The tracker {stand.__name__} gets no more of this run, which goes on: Connection refused."

    def test_a_server_that_is_not_there_is_one_sentence_before_anything_trains(
        self, tmp_path: Path, stand: Stand
    ) -> None:
        stand.lost = True
        with pytest.raises(FedkeelError, match=r"does not take this run: Connection refused\.$"):
            run_tracked(stand.__name__, tmp_path / "run")
        assert not (tmp_path / "run" / "metrics.jsonl").exists()

    @pytest.mark.slow
    def test_in_a_comparison_each_is_named_after_its_method_and_seed(self, tmp_path: Path, stand: Stand) -> None:
        words = ["compare", "fedavg", "gn", "--seeds", "2", "--jobs", "1", "--track", stand.__name__, "--quiet"]
        small = ["--subsample", "10", "--rounds", "1", "--model", "simple_cnn(width=2)", "--device", "cpu"]
        for _ in range(2):  # what is finished is not run again, and makes no further run there
            assert main([*words, *small, "--out", str(tmp_path / "c")]) == 0
            names = [call[2] for call in stand.calls if call[0] == "start"]
            assert names == ["fedavg seed 0", "fedavg seed 1", "gn seed 0", "gn seed 1"]


def test_wandb_offline_takes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run_in_two_goes("wandb", tmp_path / "run")
    assert [*(tmp_path / "run" / "wandb").glob("offline-run-*")]


def test_unseen_domains_have_their_own_curve_and_what_is_not_a_number_has_none() -> None:
    known, nothing = {"average": 0.9, "domains": {}, "unseen": None}, {"average": float("nan")}
    scores = Scores({"a": 0.5, "b": 0.1}, 0.5, 0.5, 0.1, 1.0, {"auc": known, "ece": nothing})
    found = values(scores, float("nan"))
    assert found["test/accuracy_unseen"] == 0.1
    assert found["test/auc"] == 0.9
    assert {"train/loss", "test/ece"}.isdisjoint(found)
    assert values(None, 2.0) == {"train/loss": 2.0}


def test_several_observers_are_all_told_everything_and_the_first_the_notes() -> None:
    heard: list[tuple[str, str]] = []

    class Listening(Observer):
        def __init__(self, name: str) -> None:
            for event in EVENTS:
                setattr(self, event, lambda *_, event=event: heard.append((name, event)))

    several = Observers([Listening("one"), Listening("two")])
    for event in EVENTS:
        getattr(several, event)("told")
    assert heard == [(name, event) for event in EVENTS for name in ("one", "two") if (name, event) != ("two", "note")]


EVENTS = [name for name in vars(Observer) if not name.startswith("_")]


def test_names_that_mlflow_takes() -> None:
    assert mlflow_name("test/domain/caf\u00e9 <1>") == "test/domain/caf_ _1_"
    assert mlflow_name("test/domain/..") == "test/domain/_"


def test_a_package_that_is_not_there_is_one_sentence_before_anything_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else real(name))
    assert main(["run", "--track", "wandb", "--out", str(tmp_path / "run")]) == 2
    needs = "'--track wandb' needs wandb, which is not installed: pip install 'fedkeel[wandb]'."
    assert capsys.readouterr().err == f"fedkeel: {needs}\n"
    assert main(["run", "--track", "mlflo", "--out", str(tmp_path / "run")]) == 2
    assert "did you mean 'mlflow'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_importing_fedkeel_imports_no_tracker() -> None:
    code = (
        "import sys, fedkeel.runs.trackers, fedkeel.cli; "
        "sys.exit(any(name in sys.modules for name in ('mlflow', 'tensorboard', 'wandb')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
