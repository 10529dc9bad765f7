"""Comparisons: what is finished is never run again, what is missing is named, and the table says what the runs say."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import statistics
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import nn

from fedkeel.cli import main
from fedkeel.cli.terminal.console import drawn
from fedkeel.config import Config
from fedkeel.core.naming import slug
from fedkeel.engine import children
from fedkeel.engine.children import Heart
from fedkeel.errors import FedkeelError
from fedkeel.experiments import jobs
from fedkeel.experiments.comparison import Comparison, collect_runs, compare, read_comparison, write_index
from fedkeel.experiments.findings import findings
from fedkeel.experiments.jobs import Job, JobsObserver, Trial
from fedkeel.experiments.rows import read_method, read_seeds
from fedkeel.files import seal, unseal
from fedkeel.methods import METHODS, register
from fedkeel.models import MODELS, wrap
from fedkeel.report.collect import collect
from fedkeel.stopping import Stopped, stop_requested
from tests import tiny
from tests.data.made_up import image, tree
from tests.processes import HANG, WhileStopped, running
from tests.runs.test_origin import Scaled, mine

comparing = sys.modules["fedkeel.experiments.comparison"]  # the name in the package is the function
TINY: dict[str, Any] = {
    "rounds": 1,
    "subsample": 10,
    "model": "simple_cnn(width=2)",
    "evaluate_every": 9,
    "device": "cpu",
}


def finish(directory: Path, config: Config, accuracies: dict[str, float], unseen: tuple[str, ...] = ()) -> None:
    """A finished run, by hand."""
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(config.to_toml())
    seen = [value for name, value in accuracies.items() if name not in unseen]
    summary = {
        "result": config.result,
        "round": config.rounds - 1,
        "accuracy": statistics.fmean(seen),
        "samples_accuracy": statistics.fmean(seen),
        "domains": accuracies,
        "unseen_domains": list(unseen),
        "unseen": statistics.fmean(accuracies[name] for name in unseen) if unseen else None,
        "seconds": 1.0,
        "bytes_up": 10,
        "bytes_down": 10,
        "executor": "serial",
    }
    (directory / "summary.json").write_text(json.dumps(summary))


class Watching(JobsObserver):
    def __init__(self) -> None:
        self.started: list[str] = []
        self.problems: dict[str, str] = {}
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def job_started(self, job: Job, first_round: int) -> None:
        self.started.append(f"{job} from {first_round}")

    def job_finished(self, job: Job, problem: str) -> None:
        self.problems[str(job)] = problem


class TestEntries:
    def test_options_after_the_at_sign_belong_to_that_method_alone(self) -> None:
        config = read_method(
            "fedprox(mu=0.1)+gn@learning-rate=0.5,stateless=true", {"learning_rate": 0.01, "rounds": 7}
        )
        assert (config.method, config.learning_rate, config.stateless) == ("fedprox(mu=0.1)+gn", 0.5, True)
        assert config.rounds == 7

    @pytest.mark.parametrize(
        ("text", "named"),
        [
            ("fedavg@learning_rat=1", "learning_rate"),
            ("fedavg@rounds=ten", "'ten'"),
            ("fedavg@seed=1", "seed"),
            ("fedavg@rounds", "fedavg@learning_rate=0.1"),
            ("fedavg@rounds=0", "at least 1"),
        ],
    )
    def test_a_bad_option_is_refused_and_named(self, text: str, named: str) -> None:
        with pytest.raises(FedkeelError, match=named):
            read_method(text, {})

    def test_seeds(self) -> None:
        assert read_seeds(3) == read_seeds("3") == [0, 1, 2]
        assert read_seeds("4,1") == [4, 1]
        for wrong in ("0", "a", "1,1", ""):
            with pytest.raises(FedkeelError):
                read_seeds(wrong)

    def test_different_methods_have_different_folders(self) -> None:
        texts = [
            "fedprox",
            "fedprox(mu=0.1)",
            "fedprox(mu=1)",
            "fedprox+gn",
            "fedprox@learning_rate=0.1",
            "gn(groups=2)",
        ]
        assert len({slug(text) for text in texts}) == len(texts)
        assert all("/" not in slug(text) for text in [*texts, "fedavg@data=folder(root=/a/b)"])


class TestRefusals:
    def no_training(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def train(*_: object) -> None:
            raise AssertionError("trained before everything was checked")

        monkeypatch.setattr(comparing, "run_all", train)

    @pytest.mark.parametrize(
        ("methods", "options", "named"),
        [
            (["fedavg", "fedbnn"], {}, "fedbn"),
            (["fedavg", "fedprox(nu=1)"], {}, "mu"),
            (["fedavg", "gn@model=moon_cnn"], {}, "batch norm"),
            (["fedavg", "fedbn"], {"stateless": True}, "stateless"),
            (["fedavg", "fedavg"], {}, "twice"),
            ([], {}, "nothing to compare"),
            (["fedavg"], {"seed": 3}, "seed"),
            (["fedavg"], {"jobs": 0}, "at least 1"),
        ],
    )
    def test_all_is_checked_before_anything_trains(
        self, methods: list[str], options: dict[str, Any], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.no_training(monkeypatch)
        with pytest.raises(FedkeelError, match=named):
            compare(methods, seeds=1, directory=tmp_path / "c", **{**TINY, **options})
        assert not list(tmp_path.glob("c/*/*"))

    def test_a_directory_of_another_configuration_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.no_training(monkeypatch)
        finish(tmp_path / "fedavg" / "seed0", Config(**{**TINY, "learning_rate": 0.5}), {"scan": 0.5})
        with pytest.raises(FedkeelError, match=r"another configuration \(learning_rate is 0.5 there and 0.01 here\)"):
            compare(["fedavg"], seeds=1, directory=tmp_path, **TINY)

    def test_without_a_directory_the_same_call_finds_its_own_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(comparing, "run_all", lambda *_: {})
        assert compare(["fedavg"], seeds=1, **TINY).directory == Path("runs/compare-digits-shift")
        finish(Path("runs/compare-digits-shift/fedavg/seed0"), Config(**TINY), {"scan": 0.5})
        assert compare(["fedavg"], seeds=2, **TINY).directory == Path("runs/compare-digits-shift")
        other = compare(["fedavg"], seeds=1, **{**TINY, "rounds": 2})
        assert other.directory == Path("runs/compare-digits-shift-2")


@pytest.mark.slow
class TestOutdated:
    """A run of what the method or the data were before is not one of these."""

    @pytest.fixture(autouse=True)
    def own_methods(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
        register("mine")(mine(1.0))

    def test_a_method_that_was_written_anew_is_not_taken_from_an_old_run(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"seeds": 2, "directory": tmp_path / "c", "jobs": 1, **TINY, "rounds": 2}
        first = compare(["mine", "fedavg"], **options)
        assert compare(["mine", "fedavg"], **options).rows() == first.rows()
        before = {path: path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file()}
        register("mine")(mine(0.0))
        with pytest.raises(
            FedkeelError, match=r"mine/seed0' cannot be used again, since the code of the method 'mine'"
        ):
            compare(["mine", "fedavg"], **options)
        assert {path: path.read_bytes() for path in (tmp_path / "c").rglob("*") if path.is_file()} == before
        register("mine")(mine(1.0))
        assert compare(["mine", "fedavg"], **options).rows() == first.rows()

    def test_without_a_directory_it_trains_anew_beside_the_old_one_and_says_why(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        compare(["mine"], seeds=1, jobs=1, **TINY)
        register("mine")(mine(0.0))
        watching = Watching()
        again = compare(["mine"], seeds=1, jobs=1, observer=watching, **TINY)
        assert again.directory == Path("runs/compare-digits-shift-2")
        assert watching.started == ["mine seed 0 from 0"]
        (note,) = [note for note in watching.notes if "is not used again" in note]
        assert "since the code of the method 'mine' has changed since then" in note
        assert Path("runs/compare-digits-shift/mine/seed0/summary.json").exists()
        watching = Watching()
        assert compare(["mine"], seeds=1, jobs=1, observer=watching, **TINY).directory == again.directory
        assert watching.started == []

    @pytest.mark.parametrize("finished", [True, False])
    def test_other_data_are_noticed_for_every_seed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool
    ) -> None:
        monkeypatch.setenv("FEDKEEL_CACHE", str(tmp_path / "cache"))
        root = tree(tmp_path / "images", ["a", "b"], ["cat", "dog"], 12)
        data = {
            "data": f"folder(root={root}, size=32)",
            "subsample": 0,
            "partition": "dirichlet(alpha=5, clients=2, minimum=1)",
        }
        options: dict[str, Any] = {"directory": tmp_path / "c", "jobs": 1, **TINY, **data}
        compare(["fedavg"], seeds=[0, 1], **options)
        assert len(compare(["fedavg"], seeds=[0, 1], **options).runs) == 2
        shutil.rmtree(tmp_path / "c" / "fedavg" / "seed0")  # of which the data are divided by the seed that is tried
        if not finished:
            (tmp_path / "c" / "fedavg" / "seed1" / "summary.json").unlink()
        image(root / "b" / "dog" / "003.png", (7, 7, 7))
        with pytest.raises(
            FedkeelError, match=r"seed1' cannot be used again, since its data have changed: the .* of 'b'"
        ):
            compare(["fedavg"], seeds=[0, 1], **options)

    def test_a_model_that_was_written_anew_is_noticed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def network(factor: float) -> None:
            namespace: dict[str, Any] = {"nn": nn, "__name__": "__main__"}
            layers = "self.flat = nn.Flatten(); self.fc = nn.Linear(3072, 10)"
            body = f"class Net(nn.Module):\n def __init__(self):\n  super().__init__(); {layers}\n"
            exec(f"{body} def forward(self, x): return self.fc(self.flat(x) * {factor})", namespace)
            MODELS.register("mynet")(lambda num_classes, in_channels, image_size: wrap(namespace["Net"]()))  # noqa: ARG005

        monkeypatch.setattr(MODELS, "_entries", dict(MODELS._entries))
        options: dict[str, Any] = {"seeds": 1, "directory": tmp_path, "jobs": 1, **TINY, "model": "mynet"}
        network(1.0)
        first = compare(["fedavg"], **options)
        network(1.0)
        assert compare(["fedavg"], **options).rows() == first.rows()
        network(0.5)
        with pytest.raises(FedkeelError, match="cannot be used again, since the code of the model has changed since"):
            compare(["fedavg"], **options)

    def test_what_follows_from_the_seed_is_no_change(self, tmp_path: Path) -> None:
        """Who has which images, and with `subsample` which images are had at all, also where they are pooled."""
        options: dict[str, Any] = {"directory": tmp_path, "jobs": 1, **TINY, "partition": "even(clients=2)"}
        first = compare(["central", "fedavg"], seeds=[0, 1], **options)
        watching = Watching()
        assert compare(["central", "fedavg"], seeds=[0, 1], observer=watching, **options).rows() == first.rows()
        assert watching.started == []

    def test_a_run_of_another_version_is_used_and_told(self, tmp_path: Path) -> None:
        options: dict[str, Any] = {"seeds": 1, "directory": tmp_path, "jobs": 1, **TINY}
        first = compare(["fedavg"], **options)
        path = tmp_path / "fedavg" / "seed0" / "origin.json"
        path.write_bytes(seal({**unseal(path.read_bytes()), "fedkeel": "0.0.1"}))
        watching = Watching()
        assert compare(["fedavg"], observer=watching, **options).rows() == first.rows()
        assert any("were made by fedkeel 0.0.1" in note for note in watching.notes)


class TestRunning:
    @pytest.mark.slow
    def test_each_run_has_its_directory_and_finished_ones_are_not_run_again(self, tmp_path: Path) -> None:
        first = compare(["fedavg", "gn"], seeds=1, directory=tmp_path, jobs=2, **TINY)
        assert [str(run.directory) for run in first.runs] == [f"{tmp_path}/fedavg/seed0", f"{tmp_path}/gn/seed0"]
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.parent != tmp_path}
        watching = Watching()
        again = compare(["fedavg", "gn"], seeds=1, directory=tmp_path, jobs=2, observer=watching, **TINY)
        assert watching.started == []
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.parent != tmp_path} == before
        assert again.rows() == first.rows()

    @pytest.mark.slow
    def test_a_stopped_comparison_goes_on_where_it_was(self, tmp_path: Path) -> None:
        options = {**TINY, "rounds": 3, "executor": "serial"}

        class StopInRoundOne(Watching):
            def job_progress(self, job: Job, rounds_done: float, accuracy: float | None) -> None:
                if rounds_done == 1:
                    stop_requested.set()

        try:
            with pytest.raises(Stopped):
                compare(["fedavg"], seeds=1, directory=tmp_path, jobs=1, observer=StopInRoundOne(), **options)
        finally:
            stop_requested.clear()
        watching = Watching()
        result = compare(["fedavg"], seeds=1, directory=tmp_path, jobs=1, observer=watching, **options)
        assert watching.started == ["fedavg seed 0 from 1"]
        whole = compare(["fedavg"], seeds=1, directory=tmp_path / "whole", jobs=1, **options)
        assert result.rows() == whole.rows()

    @pytest.mark.parametrize("processes", [1, 2])
    def test_a_crashed_job_is_reported_and_the_others_go_on(
        self, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def execute(job: Job, _: object) -> None:
            if job.seed == 1:
                raise RuntimeError("boom")
            if job.seed == 2:
                raise FedkeelError("One sentence.")
            if job.seed == 3 and processes == 2:
                os._exit(3)
            finish(job.directory, job.config, {"scan": 0.5})

        monkeypatch.setattr(jobs, "execute", execute)
        watching = Watching()
        result = compare(["fedavg"], seeds=5, directory=tmp_path, jobs=processes, observer=watching, **TINY)
        expected = {"fedavg seed 1": "RuntimeError: boom", "fedavg seed 2": "One sentence."}
        if processes == 2:
            expected["fedavg seed 3"] = "its process died (exit code 3)"
        assert result.failures == expected
        assert result.missing == list(expected)
        assert [row["seeds"] for row in result.rows()] == [
            [seed for seed in range(5) if f"fedavg seed {seed}" not in expected]
        ]

    def test_stopping_ends_every_process(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def execute(job: Job, observer: Any) -> None:
            observer.started(job.config, 0)
            assert stop_requested.wait(HANG), "was never asked to stop"
            raise Stopped

        class StopAtOnce(Watching):
            def job_started(self, job: Job, first_round: int) -> None:
                super().job_started(job, first_round)
                if len(self.started) == 2:
                    stop_requested.set()

        monkeypatch.setattr(jobs, "execute", execute)
        watching = StopAtOnce()
        try:
            with pytest.raises(Stopped):
                compare(["fedavg"], seeds=6, directory=tmp_path, jobs=2, observer=watching, **TINY)
        finally:
            stop_requested.clear()
        assert len(watching.started) == 2
        assert watching.problems == {}

    @pytest.mark.slow
    def test_a_job_that_hangs_is_ended_and_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def execute(*_: object) -> None:
            (tmp_path / "pid").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)

        monkeypatch.setattr(jobs, "execute", execute)
        monkeypatch.setattr(children, "Heart", lambda: Heart(3.0, WhileStopped()))
        watching, job = Watching(), Job("fedavg", 0, tmp_path / "r", Config())
        failures = jobs.run_all([job], 2, watching)
        said = "its process hung and was ended; the same command again goes on with it"
        assert failures == {job: said}
        assert watching.problems == {"fedavg seed 0": said}
        assert not running(int((tmp_path / "pid").read_text()))

    def test_a_job_that_the_system_ends_for_its_memory_says_what_to_do(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(jobs, "execute", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        job = Job("fedavg", 0, tmp_path / "r", Config())
        (said,) = jobs.run_all([job], 2, Watching()).values()
        assert said == "its process died (signal SIGKILL), as when memory runs out: give fewer --jobs"


class TestObjects:
    OPTIONS: ClassVar[Any] = {"seeds": 2, "rounds": 1, "jobs": 1, "executor": "serial", "device": "cpu"}

    def test_methods_a_model_and_a_federation_may_be_objects(self, tmp_path: Path) -> None:
        methods = ["fedprox(mu=0.5)@learning_rate=0.1", Scaled(0.5), Scaled(1.0)]
        options = {**self.OPTIONS, "federation": tiny.federation(), "model": tiny.model()}
        one = compare(methods, directory=tmp_path, **options)
        assert [row.method for row in one.results.rows] == [methods[0], "Scaled(factor=0.5)", "Scaled(factor=1.0)"]
        watching = Watching()
        assert compare(methods, directory=tmp_path, observer=watching, **options).missing == []
        assert watching.started == []  # all are known again
        alone = tiny.run(tmp_path / "alone", Scaled(0.5), rounds=1, seed=1, learning_rate=0.01, batch_size=32)
        assert tiny.result(one.runs[3]) == tiny.result(alone)
        with pytest.raises(FedkeelError, match="the code of the model has changed since then"):
            compare(methods, directory=tmp_path, **{**options, "model": tiny.model(width=5)})
        with pytest.raises(FedkeelError, match="its data have changed"):
            compare(methods, directory=tmp_path, **{**options, "federation": tiny.federation(seed=1)})

    def test_a_stopped_one_goes_on_with_its_objects(self, tmp_path: Path) -> None:
        options = {**self.OPTIONS, "federation": tiny.federation(), "model": tiny.model(), "directory": tmp_path}
        whole = compare([Scaled(0.5)], **options)
        before = tiny.result(whole.runs[0])
        (whole.runs[0].directory / "summary.json").unlink()
        assert tiny.result(compare([Scaled(0.5)], **options).runs[0]) == before

    @pytest.mark.slow
    def test_processes_have_them_too(self, tmp_path: Path) -> None:
        options = {**self.OPTIONS, "federation": tiny.federation(), "model": tiny.model(), "jobs": 2}
        assert len(compare([Scaled(0.5), "fedavg"], directory=tmp_path, **options).runs) == 4

    def test_what_is_of_another_kind_is_refused(self, tmp_path: Path) -> None:
        refused: list[tuple[Any, dict[str, Any], str]] = [
            ([Scaled], {}, "What to compare has"),
            ([Scaled(0.5), Scaled(0.5)], {}, "is given twice: keep one"),
            (["fedavg"], {"federation": "digits-shift"}, "is given as data='digits-shift'"),
            (["fedavg"], {"model": nn.Linear}, "give an object of it"),
            (["fedavg"], {"federation": tiny.federation(), "data": "folder"}, "object together with data='folder'"),
            (["fedavg"], {"federation": tiny.federation(), "unseen": "a"}, "object together with unseen='a'"),
            (["fedavg@model=mlp"], {"model": tiny.model()}, "object together with model='mlp'"),
            (Scaled(0.5), {}, "give a list of methods"),
            (["fedavg"], {"verbose": "no"}, "'verbose' is 'no': give True, False, or nothing"),
        ]
        for methods, options, wanted in refused:
            with pytest.raises(FedkeelError, match=wanted):
                compare(methods, directory=tmp_path, **options)


def test_a_comparison_is_shown_and_has_a_row_for_each_run(tmp_path: Path) -> None:
    for seed in (0, 1):
        config = Config(method="fedavg", data="npz(path=<b>x</b>)", rounds=1, seed=seed)
        finish(tmp_path / f"s{seed}", config, {"<script>": 0.5 + seed / 4, "b": 0.25})
    comparison = collect_runs([tmp_path / "s0", tmp_path / "s1"])
    assert "<script>" in repr(comparison)
    assert "fedavg" in repr(comparison)
    page = comparison._repr_html_()
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    frame = comparison.frame()
    assert frame["seed"].tolist() == [0, 1]
    assert frame["domains.<script>"].tolist() == [0.5, 0.75]
    assert frame["accuracy"].tolist() == [0.375, 0.5]
    assert set(frame["method"]) == {"fedavg"}


def test_metrics_are_columns_and_averages_over_the_sites_that_accuracy_is_of(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r", on=tiny.federation(unseen=12), rounds=2, metrics="brier")
    last = {e["client"]: e["brier"] for e in run.records("evaluation") if (e["round"], e["split"]) == (1, "test")}
    assert last.pop("stranger") != pytest.approx(statistics.fmean(last.values()))
    assert collect_runs([run.directory]).frame()["brier"].tolist() == [pytest.approx(statistics.fmean(last.values()))]


class TestResults:
    def comparison(self, place: Path) -> Comparison:
        numbers = {
            "fedavg": [(0.5, 0.7), (0.6, 0.8)],
            "fedbn": [(0.4, 0.9), (0.4, 0.9)],
            "central": [(0.9, 0.9), (1, 1)],
        }
        for method, rows in numbers.items():
            for seed, (scan, street) in enumerate(rows):
                finish(
                    place / method / f"seed{seed}", Config(method=method, seed=seed), {"scan": scan, "street": street}
                )
        runs = [{"method": m, "seed": s, "directory": f"{m}/seed{s}"} for m in numbers for s in range(2)]
        (place / "comparison.json").write_text(json.dumps({"runs": runs}))
        return read_comparison(place)

    def test_without_a_finished_run_every_format_says_so(self, tmp_path: Path) -> None:
        unfinished = Comparison(tmp_path, [Trial("fedavg", 0, tmp_path / "fedavg"), Trial("gn", 1, tmp_path / "gn")])
        for text in (unfinished.table(), unfinished.markdown(), unfinished.results.latex()):
            assert "No run is finished yet." in text
            assert "average" in text
            assert "best of its column" not in text
        assert unfinished.csv() == "method,seeds,average_mean,average_std\n"
        assert unfinished.rows() == unfinished.runs == []
        assert unfinished.missing == ["fedavg seed 0", "gn seed 1"]
        assert unfinished.to_dict()["rows"] == []
        assert findings(unfinished.results) == []
        drawn(unfinished.results)

    def test_mean_and_spread_are_those_of_the_seeds(self, tmp_path: Path) -> None:
        row = self.comparison(tmp_path).rows()[0]
        assert row["method"] == "fedavg"
        assert row["domains"]["scan"] == pytest.approx({"mean": 0.55, "std": statistics.stdev([0.5, 0.6])})
        assert row["average"] == pytest.approx({"mean": 0.65, "std": statistics.stdev([0.6, 0.7])})

    def test_the_best_of_a_column_is_marked_and_the_upper_bound_does_not_compete(self, tmp_path: Path) -> None:
        lines = self.comparison(tmp_path).markdown().splitlines()
        assert lines[0] == "| method | scan | street | average |"
        assert lines[2] == "| fedavg | **55.0 ±7.1** | 75.0 ±7.1 | **65.0 ±7.1** |"
        assert lines[3] == "| fedbn | 40.0 ±0.0 | **90.0 ±0.0** | **65.0 ±0.0** |"
        assert "**" not in lines[4]

    def test_text_and_csv_hold_every_number(self, tmp_path: Path) -> None:
        comparison = self.comparison(tmp_path)
        assert "55.0 ±7.1*" in comparison.table()
        assert "the last round" in comparison.table()
        assert "2 seeds" in comparison.table()
        header, first, *_ = comparison.csv().splitlines()
        assert header == "method,seeds,scan_mean,scan_std,street_mean,street_std,average_mean,average_std"
        assert first.startswith("fedavg,2,0.55,")
        json.dumps(comparison.to_dict())

    def test_what_a_round_costs_stands_beside_the_accuracy(self, tmp_path: Path) -> None:
        for name, up, down, questions in (("fedavg", 3e6, 3e6, 0), ("hbn", 3.2e6, 250e6, 8)):
            for seed in range(2):
                finish(tmp_path / name / f"{seed}", Config(method=name, seed=seed, rounds=4), {"scan": 0.5})
                path = tmp_path / name / f"{seed}" / "summary.json"
                counted = {"rounds": 4, "bytes_up": up, "bytes_down": down * (1 + seed), "questions": questions}
                path.write_text(json.dumps(json.loads(path.read_text()) | counted))
        both, alone = collect_runs([tmp_path]), collect_runs([tmp_path / "fedavg"])
        assert both.results.headings == ["method", "scan", "average", "MB/round", "exchanges/round"]
        assert [both.results.traffic(row) for row in both.results.rows] == [["1.88", "1"], ["94.5", "3"]]
        assert "| hbn | 50.0 ±0.0 | 50.0 ±0.0 | 94.5 | 3 |".replace("50.0 ±0.0", "**50.0 ±0.0**") in both.markdown()
        assert alone.results.headings == ["method", "scan", "average", "MB/round"]
        assert alone.table().splitlines()[2].endswith("1.88")
        assert both.csv().splitlines()[0].endswith("bytes_up_per_round,bytes_down_per_round,extra_exchanges_per_round")
        assert both.csv().splitlines()[2].endswith(",800000.0,93750000.0,2.0")
        cost = {"bytes_up": 8e5, "bytes_down": 93.75e6, "extra_exchanges": 2.0}
        assert both.rows()[1]["traffic_per_round"] == pytest.approx(cost)

    def test_an_unseen_domain_is_named_and_stays_out_of_the_average(self, tmp_path: Path) -> None:
        finish(tmp_path / "a", Config(unseen="scan"), {"scan": 0.2, "street": 0.8}, unseen=("scan",))
        results = collect_runs([tmp_path / "a"]).results
        assert results.headings == ["method", "street", "scan (unseen)", "average"]
        assert results.rows[0].average.mean == pytest.approx(0.8)
        assert results.rows[0].average.std is None

    def test_loose_runs_are_told_apart_by_what_differs(self, tmp_path: Path) -> None:
        for number, rate in enumerate((0.1, 0.1, 0.5)):
            finish(tmp_path / f"r{number}", Config(learning_rate=rate, seed=number), {"scan": 0.1 * number})
        rows = collect_runs([tmp_path]).rows()
        assert [(row["method"], row["seeds"]) for row in rows] == [
            ("fedavg@learning_rate=0.1", [0, 1]),
            ("fedavg@learning_rate=0.5", [2]),
        ]

    def test_comparisons_side_by_side_are_told_apart_too(self, tmp_path: Path) -> None:
        """Each calls its runs 'fedavg': they would be one row."""
        for number, rate in enumerate((0.1, 0.5)):
            folder = tmp_path / str(number)
            finish(folder / "fedavg" / "seed0", Config(learning_rate=rate), {"scan": 0.5 * number})
            write_index(folder, [Job(name, 0, folder / name, Config()) for name in ("fedavg", "gn")])
        found = collect_runs([tmp_path / "0", tmp_path / "1"])
        assert [row["method"] for row in found.rows()] == ["fedavg@learning_rate=0.1", "fedavg@learning_rate=0.5"]
        assert len(found.missing) == 2
        assert [row["method"] for row in collect_runs([tmp_path / "0"]).rows()] == ["fedavg"]

    def test_a_folder_of_comparisons_is_shown_and_reported_part_by_part(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for part, data in (("looks", "digits-shift"), ("labels", "digits")):
            config = Config(method="fedavg", data=data)
            finish(tmp_path / part / "fedavg" / "seed0", config, {"scan": 0.5 if part == "looks" else 0.75})
            write_index(tmp_path / part, [Job("fedavg", 0, tmp_path / part, config)])
        assert main(["show", str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        assert shown.index(" 75.0 ") < shown.index(f"in {tmp_path}/labels/") < shown.index(" 50.0 ")
        assert shown.endswith(f"The run directories are in {tmp_path}/looks/\n")
        groups = collect([tmp_path]).groups
        assert [group.labels for group in groups] == [["fedavg"], ["fedavg"]], "called as in their comparisons"
        finish(tmp_path / "stray", Config(method="gn"), {"scan": 0.25})
        assert len(collect_runs([tmp_path]).trials) == 3, "a run that is in none of them is not lost"
        assert main(["show", str(tmp_path)]) == 0
        assert " 25.0 " in capsys.readouterr().out

    def test_runs_of_different_objects_given_in_python_are_different_rows(self, tmp_path: Path) -> None:
        widths = {"narrow": 4, "wide": 5}
        for name, width in widths.items():
            for seed in (0, 1):
                tiny.run(tmp_path / f"{name}{seed}", network=tiny.model(width=width, seed=seed), rounds=1, seed=seed)
        rows = collect_runs([tmp_path]).rows()
        assert [row["seeds"] for row in rows] == [[0, 1], [0, 1]]
        assert all(re.fullmatch(r"fedavg@model=Classifier#[0-9a-f]{6}", row["method"]) for row in rows)
        collected = collect([tmp_path])
        assert [len(group.results.rows) for group in collected.groups] == [2]
        assert not any("twice" in notice for notice in collected.notices)

    def test_objects_of_different_classes_are_told_apart_by_their_names(self, tmp_path: Path) -> None:
        layers = [nn.Flatten(), nn.Linear(192, 4)]
        models = {"a": tiny.model(), "b": wrap(nn.Sequential(*layers), head="1")}
        for name, network in models.items():
            tiny.run(tmp_path / name, network=network, rounds=1)
        assert [row["method"] for row in collect_runs([tmp_path]).rows()] == [
            *("fedavg@model=Classifier", "fedavg@model=Sequential")
        ]
        for factor in (1.0, 0.5):
            tiny.run(tmp_path / "methods" / str(factor), Scaled(factor), rounds=1)
        rows = [row["method"] for row in collect_runs([tmp_path / "methods"]).rows()]
        assert rows == ["Scaled(factor=0.5)", "Scaled(factor=1.0)"]

    def test_a_method_s_own_options_stand_below_the_table_unless_names_clash(self, tmp_path: Path) -> None:
        for number, rate in enumerate((0.1, 0.5)):
            finish(tmp_path / f"r{number}", Config(learning_rate=rate), {"scan": 0.5})
        places = [Trial(f"gn@learning_rate={rate}", 0, tmp_path / f"r{n}") for n, rate in enumerate((0.1, 0.5))]
        both = Comparison(tmp_path, places).table()
        assert "gn@learning_rate=0.5" in both.splitlines()[3]
        alone = Comparison(tmp_path, places[1:]).table()
        assert alone.splitlines()[2].startswith("gn  ")
        assert "gn with learning_rate=0.5." in alone

    def test_what_is_no_run_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(FedkeelError, match="not a run directory"):
            collect_runs([tmp_path])
        (tmp_path / "comparison.json").write_text("{")
        with pytest.raises(FedkeelError, match="does not hold a comparison"):
            collect_runs([tmp_path])


@pytest.mark.slow
def test_runs_that_share_a_gpu_have_processes_that_are_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA does not survive a fork. The runs themselves are on the CPU here."""
    compare(["fedavg", "gn"], seeds=1, directory=tmp_path / "alone", jobs=1, **TINY)
    started: list[str] = []
    plain = multiprocessing.get_context

    def remembered(kind: str) -> Any:
        started.append(kind)
        return plain(kind)

    monkeypatch.setattr(jobs, "uses_gpu", lambda _: True)
    monkeypatch.setattr(multiprocessing, "get_context", remembered)
    together = compare(["fedavg", "gn"], seeds=1, directory=tmp_path / "together", jobs=2, **TINY)
    assert set(started) == {"spawn"}
    assert not together.failures
    for method in ("fedavg", "gn"):
        one, other = (tmp_path / place / method / "seed0" / "model.safetensors" for place in ("alone", "together"))
        assert one.read_bytes() == other.read_bytes()
