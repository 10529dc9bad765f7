"""Trackers: they are told what the run directory says, and without the package it is one sentence."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from fedkeel.cli import main
from fedkeel.config import Config
from fedkeel.core.evaluation import Scores
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import Comparison, compare
from fedkeel.observer import Observer, Observers
from fedkeel.runs.run import Run
from fedkeel.runs.trackers import Tracker, mlflow_name, tracked, values
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


class FakeMLflow(types.ModuleType):
    """Remembers the calls that the tracker makes of MLflow."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.__spec__ = importlib.machinery.ModuleSpec("mlflow", None)
        self.calls: list[tuple[Any, ...]] = []

    def start_run(self, run_id: str | None = None, run_name: str | None = None) -> Any:
        self.calls.append(("start", run_id, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="abc123"))

    def log_params(self, params: dict[str, Any]) -> None:
        self.calls.append(("params", params))

    def set_tag(self, name: str, value: str) -> None:
        self.calls.append(("tag", name, value))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.calls.append(("metrics", step, metrics))

    def end_run(self, status: str) -> None:
        self.calls.append(("end", status))


class TestMLflow:
    @pytest.fixture
    def mlflow(self, monkeypatch: pytest.MonkeyPatch) -> FakeMLflow:
        fake = FakeMLflow()
        monkeypatch.setitem(sys.modules, "mlflow", fake)
        return fake

    def test_it_is_told_the_options_and_every_round(self, tmp_path: Path, mlflow: FakeMLflow) -> None:
        run = run_tracked("mlflow", tmp_path / "run")
        kinds = [call[0] for call in mlflow.calls]
        assert kinds == ["start", "params", "tag", "metrics", "metrics", "metrics", "end"]
        assert mlflow.calls[0] == ("start", None, "run")
        params = mlflow.calls[1][1]
        assert params["learning_rate"] == 0.05
        assert "" not in params.values(), "MLflow refuses empty values"
        assert mlflow.calls[-1] == ("end", "FINISHED")
        for name, expected in recorded(run).items():
            told = [call[2][name] for call in mlflow.calls if call[0] == "metrics"]
            assert told == pytest.approx(expected)

    def test_a_resumed_run_goes_on_with_the_run_of_mlflow_it_began(self, tmp_path: Path, mlflow: FakeMLflow) -> None:
        run_in_two_goes("mlflow", tmp_path / "run")
        starts = [call for call in mlflow.calls if call[0] == "start"]
        assert starts == [("start", None, "run"), ("start", "abc123", None)]
        assert [call[1] for call in mlflow.calls if call[0] == "end"] == ["KILLED", "FINISHED"]

    def test_what_ended_a_run_shows_in_its_state(self, tmp_path: Path, mlflow: FakeMLflow) -> None:
        def crash(_round: int) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), tracked("mlflow", tmp_path / "run", tiny.Notes(crash)) as observer:
            tiny.run(tmp_path / "run", observer=observer)
        assert mlflow.calls[-1] == ("end", "FAILED")

    def test_a_server_that_is_lost_costs_the_curves_and_not_the_run(
        self, tmp_path: Path, mlflow: FakeMLflow, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def lost(*_: Any, **__: Any) -> None:
            raise ConnectionError("Connection refused\nmany lines more")

        monkeypatch.setattr(mlflow, "log_metrics", lost)
        notes = tiny.Notes()
        with tracked("mlflow", tmp_path / "run", notes) as observer:
            run = tiny.run(tmp_path / "run", observer=observer)
        assert run.finished
        assert notes.notes == ["MLflow gets no more of this run, which goes on without it: Connection refused."]

    def test_a_server_that_is_not_there_is_one_sentence_before_anything_trains(
        self, tmp_path: Path, mlflow: FakeMLflow, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(**_: Any) -> None:
            raise ConnectionError("Connection refused")

        monkeypatch.setattr(mlflow, "start_run", refuse)
        with pytest.raises(FedkeelError, match=r"^MLflow does not take this run: Connection refused\.$"):
            run_tracked("mlflow", tmp_path / "run")
        assert not (tmp_path / "run" / "metrics.jsonl").exists() or not Run(tmp_path / "run").records()


class TestRealMLflow:
    """Runs where MLflow is installed."""

    @pytest.fixture(params=["file", "sqlite"])
    def client(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
        if request.param == "sqlite":
            pytest.importorskip("alembic", reason="mlflow-skinny has no database")
        monkeypatch.setattr(logging.getLogger("mlflow"), "disabled", True)
        uri = f"file://{tmp_path}/store" if request.param == "file" else f"sqlite:///{tmp_path}/store.db"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        monkeypatch.chdir(tmp_path)
        return mlflow.MlflowClient

    def curve(self, client: Any, run_id: str, name: str) -> list[tuple[int, float]]:
        return [(point.step, point.value) for point in client().get_metric_history(run_id, name)]

    def test_it_has_what_the_run_recorded(self, tmp_path: Path, client: Any) -> None:
        federation = tiny.federation(domains={"ward": "caf\u00e9 <1>"})
        with tracked("mlflow", tmp_path / "run", Observer()) as observer:
            run = tiny.run(tmp_path / "run", observer=observer, on=federation)
        run_id = (tmp_path / "run" / "mlflow.txt").read_text().strip()
        for name, expected in recorded(run).items():
            found = self.curve(client, run_id, mlflow_name(name))
            assert [step for step, _ in found] == [1, 2, 3]
            assert [value for _, value in found] == pytest.approx(expected)
        there = client().get_run(run_id)
        assert (there.info.status, there.info.run_name) == ("FINISHED", "run")
        assert there.data.params["learning_rate"] == "0.05"
        assert there.data.tags["fedkeel.directory"] == str(tmp_path / "run")

    def test_a_resumed_run_goes_on_in_the_same_run(self, tmp_path: Path, client: Any) -> None:
        run = run_in_two_goes("mlflow", tmp_path / "run")
        run_id = (tmp_path / "run" / "mlflow.txt").read_text().strip()
        found = dict(self.curve(client, run_id, "train/loss"))  # round 2 is there twice, with the same value
        assert list(found.values()) == pytest.approx(recorded(run)["train/loss"])
        assert client().get_run(run_id).info.status == "FINISHED"

    @pytest.mark.parametrize("jobs", [1, pytest.param(4, marks=pytest.mark.slow)])
    def test_each_run_of_a_comparison_is_one_of_its_own(self, tmp_path: Path, client: Any, jobs: int) -> None:
        """Also of four at once that are the first to use a database."""
        comparison = compare_tracked(tmp_path / "all", "mlflow", jobs)
        assert comparison.failures == {}
        found = {run.info.run_name: run for run in client().search_runs(["0"])}
        assert sorted(found) == ["fedavg seed 0", "fedavg seed 1", "gn seed 0", "gn seed 1"]
        for place, run in zip(comparison.trials, comparison.runs, strict=True):
            there = found[str(place)]
            assert there.info.status == "FINISHED"
            assert there.data.params["seed"] == str(place.seed)
            points = self.curve(client, there.info.run_id, "test/accuracy")
            assert [value for _, value in points] == pytest.approx([s["average"] for s in run.scores()])


def compare_tracked(directory: Path, track: str, jobs: int) -> Comparison:
    options: dict[str, Any] = {"subsample": 10, "rounds": 2, "model": "simple_cnn(width=2)", "device": "cpu"}
    return compare(["fedavg", "gn"], seeds=2, directory=directory, jobs=jobs, track=track, **options)


class TestComparison:
    @pytest.mark.slow
    @pytest.mark.parametrize("jobs", [2, pytest.param(1, marks=pytest.mark.slow)])
    def test_every_method_and_seed_has_its_own_curves_in_tensorboard(self, tmp_path: Path, jobs: int) -> None:
        """Named by their directories, as TensorBoard names runs; also where they run in other processes."""
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
        comparison = compare_tracked(tmp_path / "all", "tensorboard", jobs)
        assert len(comparison.runs) == 4
        written = {path.parent.parent for path in (tmp_path / "all").rglob("events.out.tfevents.*")}
        assert written == {tmp_path / "all" / method / f"seed{seed}" for method in ("fedavg", "gn") for seed in (0, 1)}
        for run in comparison.runs:
            events = accumulator.EventAccumulator(str(run.directory / "tensorboard"))
            events.Reload()
            points = {event.step: event.value for event in events.Scalars("test/accuracy")}
            assert points == pytest.approx({s["round"] + 1: s["average"] for s in run.scores()}, rel=1e-6)

    @pytest.mark.slow
    def test_in_mlflow_each_is_named_after_its_method_and_seed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake = FakeMLflow()
        monkeypatch.setitem(sys.modules, "mlflow", fake)
        compare_tracked(tmp_path / "all", "mlflow", 1)
        names = [call[2] for call in fake.calls if call[0] == "start"]
        assert names == ["fedavg seed 0", "fedavg seed 1", "gn seed 0", "gn seed 1"]
        assert [call[1] for call in fake.calls if call[0] == "end"] == ["FINISHED"] * 4
        # What is finished is not run again, and makes no further run there.
        compare_tracked(tmp_path / "all", "mlflow", 1)
        assert len([call for call in fake.calls if call[0] == "start"]) == 4

    def test_from_the_command_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = FakeMLflow()
        monkeypatch.setitem(sys.modules, "mlflow", fake)
        small = ["--subsample", "10", "--rounds", "1", "--model", "simple_cnn(width=2)", "--device", "cpu", "--quiet"]
        words = ["compare", "fedavg", "--seeds", "7,", "--jobs", "1", "--track", "mlflow", "--out", str(tmp_path / "c")]
        assert main([*words, *small]) == 0
        assert fake.calls[0] == ("start", None, "fedavg seed 7")

    def test_a_tracker_that_does_not_exist_is_refused_before_anything_trains(self, tmp_path: Path) -> None:
        with pytest.raises(FedkeelError, match="did you mean 'mlflow'"):
            compare(["fedavg"], directory=tmp_path / "all", track="mlflo")
        assert not (tmp_path / "all").exists()

    def test_a_server_that_is_not_there_is_told_once_before_several_runs_start(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Gone(FakeMLflow):
            def __getattr__(self, name: str) -> Any:
                raise ConnectionError("Connection refused")

        monkeypatch.setitem(sys.modules, "mlflow", Gone())
        with pytest.raises(FedkeelError, match=r"^MLflow does not take these runs: Connection refused\.$"):
            compare_tracked(tmp_path / "all", "mlflow", 2)
        assert not (tmp_path / "all").exists()


def test_a_run_is_the_same_with_and_without_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", FakeMLflow())
    assert tiny.result(run_tracked("mlflow", tmp_path / "a")) == tiny.result(tiny.run(tmp_path / "b"))


def test_unseen_domains_have_their_own_curve_and_what_is_not_a_number_has_none() -> None:
    scores = Scores(domains={"a": 0.5, "b": 0.1}, average=0.5, samples=0.5, unseen=0.1, loss=1.0)
    assert values(scores, 2.0)["test/accuracy_unseen"] == 0.1
    assert values(None, 2.0) == {"train/loss": 2.0}

    class Listening(Tracker):
        def log(self, round: int, values: dict[str, float]) -> None:
            self.heard = values

        def open(self, config: Any, first_round: int) -> None: ...

    tracker = Listening("somewhere")
    tracker.started(Config(), 0)
    tracker.round_done(0, 1, None, float("nan"))
    assert tracker.heard == {}


def test_several_observers_are_all_told_everything() -> None:
    class Listening(Observer):
        def __init__(self) -> None:
            self.heard: list[str] = []

        def started(self, config: Any, first_round: int) -> None:
            self.heard.append("started")

        def client_done(self, round: int, done: int, total: int) -> None:
            self.heard.append("client_done")

        def round_done(self, round: int, rounds: int, scores: Any, loss: float) -> None:
            self.heard.append("round_done")

        def note(self, text: str) -> None:
            self.heard.append(text)

    two = Listening(), Listening()
    several = Observers(two)
    several.started(None, 0)  # type: ignore[arg-type]
    several.client_done(0, 1, 2)
    several.round_done(0, 1, None, 0.0)
    several.note("a note")
    assert two[1].heard == ["started", "client_done", "round_done"]
    assert two[0].heard == [*two[1].heard, "a note"]  # once is enough
    hooks = {name for name in vars(Observer) if not name.startswith("_")}
    assert hooks - {"note"} <= {*vars(several)}, "a hook added to Observer is passed on too"


def test_names_that_mlflow_takes() -> None:
    assert mlflow_name("test/domain/caf\u00e9 <1>") == "test/domain/caf_ _1_"
    assert mlflow_name("test/domain/..") == "test/domain/_"


class TestMissing:
    def test_a_package_that_is_not_there_is_one_sentence_before_anything_trains(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        real = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else real(name))
        assert main(["run", "--track", "tensorboard", "--out", str(tmp_path / "run")]) == 2
        assert capsys.readouterr().err == (
            "fedkeel: '--track tensorboard' needs tensorboard, which is not installed: "
            "pip install 'fedkeel[tensorboard]'.\n"
        )
        assert not (tmp_path / "run").exists()

    def test_a_tracker_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(FedkeelError, match="did you mean 'mlflow'"), tracked("mlflo", tmp_path, Observer()):
            pass

    @pytest.mark.slow
    def test_importing_fedkeel_imports_neither_trackers_nor_matplotlib(self) -> None:
        code = (
            "import sys, fedkeel, fedkeel.report, fedkeel.runs.trackers, fedkeel.cli; "
            "sys.exit(any(name in sys.modules for name in ('mlflow', 'tensorboard', 'matplotlib')))"
        )
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_metrics_that_are_asked_for_are_tracked_where_they_are_known() -> None:
    known, unknown = {"average": 0.9, "domains": {}, "unseen": None}, {"average": float("nan")}
    scores = Scores({"a": 0.5}, 0.5, 0.5, None, 1.0, {"auc": known, "ece": unknown})
    found = values(scores, 2.0)
    assert found["test/auc"] == 0.9
    assert "test/ece" not in found
