"""A search chooses on validation data alone, and goes on where it was stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedkeel
from fedkeel.data.federation import Federation
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import collect_runs
from fedkeel.experiments.jobs import Job
from fedkeel.experiments.tune import Tuning, fresh_seeds, read_tuning
from fedkeel.methods import Method
from fedkeel.runs.run import Run
from fedkeel.stopping import Stopped, stop_requested
from tests import tiny, vectors
from tests.experiments.made_up import Watching

optuna = pytest.importorskip("optuna")
searching = sys.modules["fedkeel.experiments.tune"]  # the name in the package is the function
LOSS = {"result": "best-validation", "select_by": "loss"}
RATES = {"learning_rate": [1e-9, 1e-4, 1e-3, 0.03, 0.1, 1e-7, 1e-8, 1e-6]}


def sites(**options: Any) -> Federation:
    """Two that train, each with twelve samples for validation, and one that is unseen."""
    return vectors.federation(**{"validation": 0.3, "unseen": "west", **options})


def tune(directory: Path, *methods: str | Method, on: Federation | None = None, **options: Any) -> Tuning:
    given: dict[str, Any] = {**tiny.OPTIONS, "batch_size": 8, "model": "mlp", "rounds": 2, "seeds": 1, "jobs": 1}
    given |= {"observer": Watching(), "federation": on or sites(), **options}
    return fedkeel.tune(methods or ("fedavg",), directory=directory, **given)


def found(tuning: Tuning) -> Any:
    """All that a search decides."""
    return json.loads(json.dumps(tuning.methods))


class TestChoosing:
    @pytest.mark.slow
    def test_trials_that_fall_behind_end_early_and_the_choice_is_that_of_all(self, tmp_path: Path) -> None:
        options = {"space": RATES, "trials": 8, "rounds": 4}
        pruned, full = tune(tmp_path / "p", **options), tune(tmp_path / "f", prune=False, **options)
        assert pruned.best["fedavg"]["learning_rate"] in (0.03, 0.1)
        assert pruned.best == full.best
        early = [trial for trial in pruned.trials if trial["state"] == "pruned"]
        assert early
        assert all(2 < trial["rounds"] < 4 for trial in early)  # never before half of the rounds
        assert {trial["state"] for trial in full.trials} == {"finished"}

    def test_test_labels_decide_nothing(self, tmp_path: Path) -> None:
        federation = sites()
        labels = federation.labels.clone()
        for client in federation:
            labels[client.test] = (labels[client.test] + 1) % 3
        one = tune(tmp_path / "one", on=federation, trials=6)
        other = tune(tmp_path / "other", on=replace(federation, labels=labels), trials=6)
        assert found(one) == found(other)
        assert one.comparison.rows() != other.comparison.rows()

    def test_a_trial_has_looked_at_no_test_sample_and_no_unseen_domain(self, tmp_path: Path) -> None:
        tuning = tune(tmp_path, space={"learning_rate": [0.05]})
        run = Run(tmp_path / "trials" / "fedavg" / "000")
        assert {entry["samples"] for entry in run.records("evaluation")} == {12}
        assert sorted(run.domains) == ["north", "south"]
        assert [trial["score"] for trial in tuning.trials] == [run.accuracy]
        assert sorted(tuning.comparison.runs[0].domains) == ["north", "south", "west"]

    @pytest.mark.slow
    def test_the_same_seed_finds_the_same_and_jobs_side_by_side_try_as_many(self, tmp_path: Path) -> None:
        one, two = (found(tune(tmp_path / name, "fedavg", "fedprox", trials=4)) for name in ("one", "two"))
        assert one == two
        other = found(tune(tmp_path / "other", "fedavg", trials=4, search_seed=4))
        assert [t["params"] for t in other[0]["trials"]] != [t["params"] for t in one[0]["trials"]]
        several = tune(tmp_path / "several", "fedavg", "fedprox", trials=4, jobs=2)
        assert [(t["method"], t["number"]) for t in several.trials] == [
            (method, number) for method in ("fedavg", "fedprox") for number in range(4)
        ]

    def test_lists_that_are_short_enough_are_tried_whole_each_point_once(self, tmp_path: Path) -> None:
        space = {"learning_rate": [0.01, 0.05], "fedprox.mu": [0.1, 0.01], "batch_size": [16, 8]}
        tuning = tune(tmp_path, "fedprox", space=space, trials=8)
        points = [(trial["learning_rate"], trial["fedprox.mu"], trial["batch_size"]) for trial in tuning.trials]
        assert points[0] == (0.05, 0.01, 8)  # the default settings
        assert len(set(points)) == len(points) == 8

    def test_the_lowest_loss_is_chosen_and_told_as_it_was_measured(self, tmp_path: Path) -> None:
        tuning = tune(tmp_path, space={"learning_rate": [1e-7, 0.1]}, **LOSS)
        low, high = (trial["score"] for trial in sorted(tuning.trials, key=lambda trial: -trial["learning_rate"]))
        assert 0 < low < high
        assert tuning.best == {"fedavg": {"learning_rate": 0.1}}
        run = Run(tmp_path / "trials" / "fedavg" / "001")
        assert low == min(entry["loss"] for entry in run.scores("validation"))

    def test_a_trial_that_fails_is_not_chosen_and_the_others_go_on(self, tmp_path: Path) -> None:
        tuning = tune(tmp_path, space={"learning_rate": [1e30, 0.05]})
        assert [(trial["state"], trial["learning_rate"]) for trial in tuning.trials] == [
            ("finished", 0.05),
            ("failed", 1e30),
        ]
        assert tuning.best == {"fedavg": {"learning_rate": 0.05}}
        assert "its loss became nan" in tuning.methods[0]["trials"][1]["problem"]

    @pytest.mark.parametrize("jobs", [1, 2])
    def test_when_all_fail_it_says_so_and_compares_nothing(self, jobs: int, tmp_path: Path) -> None:
        with pytest.raises(FedkeelError, match=r"All trials of 'fedavg' failed, the last: No client had a usable"):
            tune(tmp_path, space={"learning_rate": [1e30, 2e30]}, jobs=jobs)
        assert not (tmp_path / "best").exists()


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a search that is over; nobody goes on with it."""
    return tune(tmp_path_factory.mktemp("searched"), trials=5).directory


class TestGoingOn:
    def test_a_stopped_search_repeats_at_most_what_was_under_way(self, tmp_path: Path) -> None:
        options = {"trials": 5, "rounds": 3}

        class Stop(Watching):
            def job_progress(self, job: Job, rounds_done: float, accuracy: float | None) -> None:
                if str(job) == "fedavg trial 3" and rounds_done == 1:
                    stop_requested.set()

        try:
            with pytest.raises(Stopped):
                tune(tmp_path / "s", observer=Stop(), **options)
        finally:
            stop_requested.clear()
        with pytest.raises(FedkeelError, match=r"The search in '.*' is not finished: go on with it"):
            collect_runs([tmp_path / "s"])
        watching = Watching()
        went_on = tune(tmp_path / "s", observer=watching, **options)
        started = [text for text in watching.started if "trial" in text]
        assert started == ["fedavg trial 3 from 0", "fedavg trial 4 from 0"]
        whole = tune(tmp_path / "w", **options)
        assert [t["params"] for t in found(went_on)[0]["trials"][:4]] == [
            t["params"] for t in found(whole)[0]["trials"][:4]
        ]

    def test_what_is_done_is_not_done_again_and_more_trials_are_added(self, tmp_path: Path) -> None:
        first, watching = tune(tmp_path, trials=4), Watching()
        again = tune(tmp_path, trials=4, observer=watching)
        assert watching.started == []
        assert found(again) == found(first)
        assert again.comparison.rows() == first.comparison.rows()
        more = tune(tmp_path, trials=6, observer=watching)
        assert [text for text in watching.started if "trial" in text] == [
            f"fedavg trial {number} from 0" for number in (4, 5)
        ]
        assert found(more)[0]["trials"][:4] == found(first)[0]["trials"]

    @pytest.mark.parametrize(
        ("methods", "options", "what"),
        [
            (["fedavg"], {"rounds": 3}, "fedavg"),
            (["fedavg"], {"space": "learning_rate=log(0.1, 1)"}, "fedavg"),
            (["fedprox"], {}, "fedavg"),
            (["fedavg"], {"prune": False}, "prune"),
            (["fedavg"], {"search_seed": 9}, "search_seed"),
            (["fedavg"], {"trials": 3}, "trials"),
        ],
    )
    def test_another_search_is_not_put_into_the_same_folder(
        self, methods: list[str], options: dict[str, Any], what: str, searched: Path
    ) -> None:
        with pytest.raises(FedkeelError, match=rf"holds a search with other settings \('{what}'\)"):
            tune(searched, *methods, **{"trials": 5, **options})

    def test_a_folder_with_something_else_in_it_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "mine.txt").write_text("mine")
        with pytest.raises(FedkeelError, match="is not empty and holds no search"):
            tune(tmp_path)
        (tmp_path / "tuning.json").write_text("[]")
        with pytest.raises(FedkeelError, match=r"tuning\.json' cannot be read as a search"):
            tune(tmp_path)

    def test_without_a_directory_the_same_call_finds_its_own_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        options: dict[str, Any] = {**tiny.OPTIONS, "rounds": 1, "seeds": 1, "jobs": 1, "trials": 2}
        objects: dict[str, Any] = {"federation": sites(), "model": "mlp"}
        first, again = (fedkeel.tune(["fedavg"], **options, **objects) for _ in range(2))
        other = fedkeel.tune(["fedavg"], **{**options, "batch_size": 16}, **objects)
        assert [str(t.directory) for t in (first, again, other)] == [*["runs/tune-own"] * 2, "runs/tune-own-2"]

    def test_optuna_reads_what_is_in_the_folder(self, searched: Path) -> None:
        journal = optuna.storages.journal.JournalFileBackend(str(searched / "tuning.journal"))
        (study,) = optuna.get_all_study_summaries(optuna.storages.JournalStorage(journal))
        assert (study.study_name, study.n_trials) == ("fedavg", 5)


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"space": "model=[mlp, mlpp]"}, "There is no model named 'mlpp'"),
            ({"model": torch.nn.Linear(6, 3), "space": "model=[mlp]"}, "the model is given as an object"),
            ({"space": "optimizer=[sgd, adamm]"}, "There is no optimizer named 'adamm'"),
            ({"trials": 0}, "'trials' is 0: give a whole number, at least 1."),
            ({"seeds": [0, 1]}, "The seed 0 is the search's"),
            ({"search_seed": -1}, "'search_seed' is -1"),
            ({"jobs": 0}, "'jobs' is 0"),
            ({"evaluate_on": "validation"}, "'evaluate_on' is set"),
            ({"seed": 3}, "'seed' is set for all runs"),
            ({"on": sites(validation=0.0)}, "'own' has no validation samples to choose settings by"),
        ],
    )
    def test_all_is_refused_before_anything_trains(
        self, options: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(searching, "run_all", lambda *_: pytest.fail("trained before everything was checked"))
        with pytest.raises(FedkeelError) as refused:
            tune(tmp_path / "t", **options)
        assert sentence in str(refused.value)
        assert not (tmp_path / "t").exists()

    def test_without_optuna_it_says_what_to_install(self) -> None:
        code = "import sys; sys.modules['optuna'] = None; import fedkeel; fedkeel.tune"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert "Tuning needs Optuna: pip install 'fedkeel[tune]'." in done.stderr


def test_the_seeds_of_the_comparison_are_none_of_the_search_s() -> None:
    assert fresh_seeds(3, 0) == [1, 2, 3]
    assert fresh_seeds("3", 1) == [0, 2, 3]
    assert fresh_seeds([4, 5], 0) == [4, 5]


def test_a_method_that_is_an_object_is_tuned_by_the_options_of_all(tmp_path: Path) -> None:
    class Plain(Method):
        """Nothing of its own."""

    tuning = tune(tmp_path, Plain(), space={"learning_rate": [1e-7, 0.1]})
    assert tuning.best == {"Plain": {"learning_rate": 0.1}}
    assert [row["method"].partition("@")[2] for row in tuning.comparison.rows()] == ["learning_rate=0.1"]


def test_a_search_is_read_again(searched: Path) -> None:
    again = read_tuning(searched)
    assert repr(again).startswith(f"Tuning('{searched}')")
    assert again.best["fedavg"].keys() == {"learning_rate"}
    assert len(again.frame()) == 5
    assert [trial.label for trial in collect_runs([searched]).trials] == [t.label for t in again.comparison.trials]


def test_validation_takes_the_place_of_the_test(tmp_path: Path) -> None:
    options: dict[str, Any] = {**tiny.OPTIONS, "model": "mlp", "rounds": 1, "evaluate_on": "validation"}
    run = fedkeel.simulate(directory=tmp_path / "run", federation=sites(), **options)
    assert {record["samples"] for record in run.records("evaluation")} == {12}
    assert collect_runs([run.directory]).table().splitlines()[-1].startswith("Validation accuracy in %")
