"""A search chooses on validation data alone, the same whatever runs beside it, and goes on where it was stopped."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedkeel
from fedkeel.data.federation import Federation
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import collect_runs
from fedkeel.experiments.jobs import Enough, Job
from fedkeel.experiments.tune import Tuning, fresh_seeds, read_tuning
from fedkeel.experiments.tune_search import MethodSearch, Search, storage_in
from fedkeel.methods import Method
from fedkeel.runs.run import Run
from fedkeel.stopping import Stopped, stop_requested
from tests import tiny, vectors
from tests.experiments.made_up import Watching

pytest.importorskip("optuna")
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
    def test_the_pruned_search_chooses_what_the_full_grid_chooses(self, tmp_path: Path) -> None:
        options = {"space": RATES, "trials": 8, "rounds": 4}
        pruned, full = tune(tmp_path / "p", **options), tune(tmp_path / "f", prune=False, **options)
        assert pruned.best == full.best
        assert pruned.best["fedavg"]["learning_rate"] in (0.03, 0.1)
        early = [trial for trial in pruned.trials if trial["state"] == "pruned"]
        assert {trial["learning_rate"] for trial in early} <= {1e-7, 1e-8, 1e-6}
        assert early
        assert all(2 <= trial["rounds"] < 4 for trial in early)  # never before half of the rounds
        assert {trial["state"] for trial in full.trials} == {"finished"}
        # What was not pruned is what it is in the full search.
        whole = {trial["number"]: trial for trial in full.trials}
        assert all(trial == whole[trial["number"]] for trial in pruned.trials if trial not in early)

    @pytest.mark.slow
    def test_one_that_goes_on_after_it_fell_behind_counts_as_if_it_had_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A process is told late, and how far it comes until then depends on the machine."""
        options = {"space": RATES, "trials": 8, "rounds": 4}
        at_once, told = tune(tmp_path / "at once", **options), Search.job_progress

        def late(search: Search, *about: Any) -> None:
            with suppress(Enough):
                told(search, *about)

        monkeypatch.setattr(Search, "job_progress", late)
        assert found(tune(tmp_path / "late", **options)) == found(at_once)

    def test_test_labels_decide_nothing(self, tmp_path: Path) -> None:
        federation = sites()
        labels = federation.labels.clone()
        for client in federation:
            labels[client.test] = (labels[client.test] + 1) % 3
        options = {"trials": 6}
        one = tune(tmp_path / "one", on=federation, **options)
        other = tune(tmp_path / "other", on=replace(federation, labels=labels), **options)
        assert found(one) == found(other)
        assert one.comparison.rows() != other.comparison.rows()

    def test_a_trial_has_looked_at_no_test_sample_and_no_unseen_domain(self, tmp_path: Path) -> None:
        tuning = tune(tmp_path, space={"learning_rate": [0.05]})
        run = Run(tmp_path / "trials" / "fedavg" / "000")
        assert [entry["average"] for entry in run.scores("test")] == [e["average"] for e in run.scores("validation")]
        assert {entry["samples"] for entry in run.records("evaluation")} == {12}
        assert sorted(run.domains) == ["north", "south"]
        assert sorted(tuning.comparison.runs[0].domains) == ["north", "south", "west"]

    @pytest.mark.slow
    def test_the_same_seed_finds_the_same_whatever_runs_beside_it(self, tmp_path: Path) -> None:
        options = {"trials": 6, "rounds": 2}
        one = found(tune(tmp_path / "one", "fedavg", "fedprox", **options))
        assert found(tune(tmp_path / "two", "fedavg", "fedprox", jobs=2, **options)) == one
        other = found(tune(tmp_path / "other", "fedavg", search_seed=4, **options))
        assert [t["params"] for t in other[0]["trials"]] != [t["params"] for t in one[0]["trials"]]

    def test_the_first_trial_has_the_default_settings_and_the_others_have_others(self, tmp_path: Path) -> None:
        tuning = tune(tmp_path, "fedprox", space="fedprox.mu=log(0.001, 1), learning_rate=log(0.01, 0.3)", trials=6)
        values = [(trial["fedprox.mu"], trial["learning_rate"]) for trial in tuning.trials]
        assert values[0] == (0.01, 0.05)
        assert len(set(values)) == 6
        assert all(0.001 <= mu <= 1 and 0.01 <= rate <= 0.3 for mu, rate in values)
        first = Run(tmp_path / "trials" / "fedprox" / "001").config
        assert (first.method, first.learning_rate) == (f"fedprox(mu={values[1][0]!r})", values[1][1])

    def test_lists_that_are_short_enough_are_tried_whole_each_point_once(self, tmp_path: Path) -> None:
        watching = Watching()
        space = {"learning_rate": [0.01, 0.05], "fedprox.mu": [0.1, 0.01], "batch_size": [16, 8]}
        tuning = tune(tmp_path, "fedprox", space=space, trials=8, observer=watching)
        points = [(trial["learning_rate"], trial["fedprox.mu"], trial["batch_size"]) for trial in tuning.trials]
        assert points[0] == (0.05, 0.01, 8)  # the default settings
        assert len(set(points)) == len(points) == 8
        assert "fedprox: each of the 8 settings is tried once, as they are few." in watching.notes

    def test_a_method_that_the_space_has_nothing_for_is_run_as_it_is(self, tmp_path: Path) -> None:
        tuning = tune(tmp_path, "fedavg", "fedprox", space="fedprox.mu=[0.01, 0.1]", trials=5)
        assert tuning.best["fedavg"] == {}
        assert [trial["method"] for trial in tuning.trials] == ["fedavg", "fedprox", "fedprox"]
        assert tuning.comparison.rows()[0]["method"] == "fedavg"

    def test_every_method_has_as_many_trials(self, tmp_path: Path) -> None:
        tuning = tune(tmp_path, "fedavg", "fedprox", trials=3, rounds=1)
        assert [trial["method"] for trial in tuning.trials] == ["fedavg"] * 3 + ["fedprox"] * 3

    def test_the_lowest_loss_is_chosen_and_told_as_it_was_measured(self, tmp_path: Path) -> None:
        tuning = tune(tmp_path, space={"learning_rate": [1e-7, 0.1]}, **LOSS)
        low, high = (trial["score"] for trial in sorted(tuning.trials, key=lambda trial: -trial["learning_rate"]))
        assert 0 < low < high
        assert tuning.best == {"fedavg": {"learning_rate": 0.1}}
        run = Run(tmp_path / "trials" / "fedavg" / "001")
        assert low == min(entry["loss"] for entry in run.scores("validation"))

    @pytest.mark.parametrize("kind", ["batch", "both", "site", "all"])
    def test_the_statistics_that_results_are_told_of_decide(self, kind: Any, tmp_path: Path) -> None:
        (trial,) = tune(tmp_path, space={"learning_rate": [0.05]}, evaluate_with=kind).trials
        run = Run(tmp_path / "trials" / "fedavg" / "000")
        first = run.config.statistics[0]
        assert trial["score"] == run.scores("validation", first)[-1]["average"] == run.accuracy

    def test_a_value_at_the_end_of_its_range_is_told(self, tmp_path: Path) -> None:
        tuning = tune(tmp_path, space={"learning_rate": [1e-8, 1e-7, 0.1]})
        (note,) = tuning.notes
        assert note == (
            "learning_rate of fedavg, 0.1, is at the upper end of what was tried, [1e-08, 1e-07, 0.1]: widen it, in "
            "another directory."
        )


class TestFailing:
    def test_a_trial_that_fails_is_the_worst_and_the_others_go_on(self, tmp_path: Path) -> None:
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


CUT_OFF: dict[str, Any] = {
    "trials": 4,
    "rounds": 1,
    "space": "learning_rate=log(0.01, 1), momentum=uniform(0, 0.9)",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Any]:
    """The journal of a search that nobody disturbed, and what it found."""
    directory = tmp_path_factory.mktemp("whole") / "w"
    tuning = tune(directory, **CUT_OFF)
    return (directory / "tuning.journal").read_bytes(), found(tuning)


class TestGoingOn:
    def test_a_stopped_search_goes_on_and_finds_what_it_would_have(self, tmp_path: Path) -> None:
        options = {"trials": 7, "rounds": 3}

        class Stop(Watching):
            def job_progress(self, job: Job, rounds_done: float, accuracy: float | None) -> None:
                if str(job) == "fedavg trial 5" and rounds_done == 1:
                    stop_requested.set()

        try:
            with pytest.raises(Stopped):
                tune(tmp_path / "s", observer=Stop(), **options)
        finally:
            stop_requested.clear()
        states = [
            trial["state"] for trial in json.loads((tmp_path / "s" / "tuning.json").read_text())["methods"][0]["trials"]
        ]
        assert states == ["finished"] * 5 + ["running"] * 2
        with pytest.raises(FedkeelError, match=r"The search in '.*' is not finished: go on with it"):
            collect_runs([tmp_path / "s"])
        watching = Watching()
        went_on = tune(tmp_path / "s", observer=watching, **options)
        assert [text for text in watching.started if "trial" in text] == [
            "fedavg trial 5 from 1",
            "fedavg trial 6 from 0",
        ]
        whole = tune(tmp_path / "w", **options)
        assert found(went_on) == found(whole)
        assert went_on.comparison.rows() == whole.comparison.rows()

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [2, 6])  # one that finishes, and one that is behind
    def test_one_that_was_killed_before_it_wrote_down_what_came_of_a_trial(
        self, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options = {"space": RATES, "trials": 8, "rounds": 4}
        tell = MethodSearch.finish

        def dies(self: MethodSearch, job: Any, problem: str) -> None:
            if job.number == number:
                raise KeyboardInterrupt
            tell(self, job, problem)

        monkeypatch.setattr(MethodSearch, "finish", dies)
        with pytest.raises(KeyboardInterrupt):
            tune(tmp_path / "k", **options)
        monkeypatch.setattr(MethodSearch, "finish", tell)
        watching = Watching()
        went_on = tune(tmp_path / "k", observer=watching, **options)
        assert not [text for text in watching.started if text.startswith(f"fedavg trial {number} ")]
        assert found(went_on) == found(tune(tmp_path / "w", **options))

    @pytest.mark.slow
    @pytest.mark.parametrize("line", range(2, 22, 2))
    def test_one_that_was_cut_off_in_whatever_line_of_its_journal(
        self, line: int, tmp_path: Path, whole: tuple[bytes, Any]
    ) -> None:
        journal, chosen = whole
        (tmp_path / "c").mkdir()
        lines = journal.splitlines(keepends=True)
        (tmp_path / "c" / "tuning.journal").write_bytes(b"".join(lines[:line]) + lines[line][:-5])
        assert found(tune(tmp_path / "c", **CUT_OFF)) == chosen

    def test_one_that_was_killed_while_it_wrote_keeps_nobody_waiting(self, tmp_path: Path) -> None:
        lock = tmp_path / "tuning.journal.lock"
        lock.symlink_to("runs/tune-own/tuning.journal")
        storage_in(tmp_path)
        assert not lock.is_symlink()
        assert tune(tmp_path, trials=1, rounds=1).best

    def test_a_damaged_journal_is_told(self, tmp_path: Path) -> None:
        tune(tmp_path, trials=2, rounds=1)
        journal = tmp_path / "tuning.journal"
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(b"".join([*lines[:3], b"{\n", *lines[4:]]))
        with pytest.raises(FedkeelError, match=r"'.*tuning\.journal' is damaged"):
            tune(tmp_path, trials=2, rounds=1)

    def test_what_is_done_is_not_done_again(self, tmp_path: Path) -> None:
        first, watching = tune(tmp_path, trials=5), Watching()
        again = tune(tmp_path, trials=5, observer=watching)
        assert watching.started == []
        assert found(again) == found(first)
        assert again.comparison.rows() == first.comparison.rows()

    def test_more_trials_are_what_they_would_have_been_from_the_start(self, tmp_path: Path) -> None:
        tune(tmp_path / "one", trials=5)
        watching = Watching()
        more = tune(tmp_path / "one", trials=8, observer=watching)
        assert [text.split(" from")[0] for text in watching.started if "trial" in text] == [
            f"fedavg trial {number}" for number in (5, 6, 7)
        ]
        assert found(more) == found(tune(tmp_path / "two", trials=8))

    @pytest.mark.parametrize(
        ("methods", "options", "what"),
        [
            (["fedavg"], {"rounds": 3}, "rounds of fedavg is 2 there and 3 here"),
            (["fedavg"], {"space": "learning_rate=log(0.1, 1)"}, "space of fedavg is"),
            (["fedprox"], {}, "of fedavg"),
            (["fedavg"], {"prune": False}, "prune of all is True there and False here"),
            (["fedavg"], {"search_seed": 9}, "search_seed of all is 0 there and 9 here"),
            (["fedavg"], {"trials": 3}, "it has 5 trials, and 3 are fewer"),
            (["fedavg"], {"weight_decay": 0.1}, "weight_decay of fedavg is 0.0 there and 0.1 here"),
        ],
    )
    def test_another_search_is_not_put_into_the_same_folder(
        self, methods: list[str], options: dict[str, Any], what: str, searched: Path
    ) -> None:
        with pytest.raises(FedkeelError) as refused:
            tune(searched, *methods, **{"trials": 5, **options})
        assert f"holds another search ({what}" in str(refused.value)

    def test_other_data_are_not_gone_on_with(self, tmp_path: Path) -> None:
        tune(tmp_path, trials=5)
        with pytest.raises(FedkeelError, match="cannot be gone on with, since its data have changed"):
            tune(tmp_path, trials=6, on=sites(split_seed=1))

    @pytest.mark.parametrize(
        "text", ["", "[]", '{"settings": 1, "trials": 2, "methods": [], "select_by": "loss"}', '{"settings": {}}']
    )
    def test_a_search_that_cannot_be_read_is_told(self, text: str, tmp_path: Path) -> None:
        (tmp_path / "tuning.json").write_text(text)
        with pytest.raises(FedkeelError, match=r"tuning\.json' cannot be read as a search"):
            tune(tmp_path)

    def test_a_folder_with_something_else_in_it_is_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "mine.txt").write_text("mine")
        with pytest.raises(FedkeelError, match="is not empty and holds no search"):
            tune(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]

    def test_without_a_directory_the_same_call_finds_its_own_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        options: dict[str, Any] = {**tiny.OPTIONS, "rounds": 1, "seeds": 1, "jobs": 1, "trials": 2}
        objects: dict[str, Any] = {"federation": sites(), "model": "mlp"}
        first, again = (fedkeel.tune(["fedavg"], **options, **objects) for _ in range(2))
        other = fedkeel.tune(["fedavg"], **{**options, "batch_size": 16}, **objects)
        assert [str(t.directory) for t in (first, again, other)] == [*["runs/tune-own"] * 2, "runs/tune-own-2"]


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"space": "learning_rate=log(0, 1)"}, "needs a lower end above 0"),
            ({"space": "hbn.momentum=[0.1]"}, "is in none of the methods"),
            ({"space": "rounds=int(1, 5)"}, "decides what is measured"),
            ({"space": "model=[mlp, mlpp]"}, "There is no model named 'mlpp'"),
            ({"model": torch.nn.Linear(6, 3), "space": "model=[mlp]"}, "the model is given as an object"),
            ({"space": "optimizer=[sgd, adamm]"}, "There is no optimizer named 'adamm'"),
            ({"space": "schedule=[cosine, sine]"}, "There is no schedule named 'sine'"),
            ({"trials": 0}, "'trials' is 0: give a whole number, at least 1."),
            ({"trials": "20"}, "'trials' is '20'"),
            ({"seeds": 0}, "'seeds' is 0"),
            ({"seeds": [0, 1]}, "The seed 0 is the search's"),
            ({"search_seed": -1}, "'search_seed' is -1"),
            ({"prune": "no"}, "'prune' is 'no': give True or False."),
            ({"jobs": 0}, "'jobs' is 0"),
            ({"evaluate_on": "test"}, "'evaluate_on' is set"),
            ({"seed": 3}, "'seed' is set for all runs"),
            ({"on": sites(validation=0.0)}, "'own' has no validation samples to choose settings by"),
        ],
    )
    def test_all_is_refused_before_anything_trains(
        self, options: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def train(*_: object) -> None:
            raise AssertionError("trained before everything was checked")

        monkeypatch.setattr(searching, "run_waiting", train)
        with pytest.raises(FedkeelError) as refused:
            tune(tmp_path / "t", **options)
        assert sentence in str(refused.value)
        assert not (tmp_path / "t").exists()

    def test_a_row_is_not_compared_on_validation_samples(self, tmp_path: Path) -> None:
        with pytest.raises(FedkeelError, match="'evaluate_on' is set"):
            tune(tmp_path, "fedavg", "fedprox@evaluate_on=validation")

    def test_without_optuna_it_says_what_to_install(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "optuna", None)
        with pytest.raises(FedkeelError, match=r"Tuning needs Optuna, .*: pip install 'fedkeel\[tune\]'\."):
            tune(tmp_path)


def test_the_seeds_of_the_comparison_are_none_of_the_search_s() -> None:
    assert fresh_seeds(3, 0) == [1, 2, 3]
    assert fresh_seeds("3", 1) == [0, 2, 3]
    assert fresh_seeds(2, 7) == [0, 1]
    assert fresh_seeds([4, 5], 0) == [4, 5]
    assert fresh_seeds("4,", 0) == [4]


def test_a_method_that_is_an_object_is_tuned_by_the_options_of_all(tmp_path: Path) -> None:
    class Plain(Method):
        """Nothing of its own."""

    tuning = tune(tmp_path, Plain(), space={"learning_rate": [1e-7, 0.1]})
    assert tuning.best == {"Plain": {"learning_rate": 0.1}}
    assert [row["method"].partition("@")[2] for row in tuning.comparison.rows()] == ["learning_rate=0.1"]


def test_a_search_is_read_again_without_optuna(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = tune(tmp_path, trials=2, rounds=1)
    monkeypatch.setitem(sys.modules, "optuna", None)
    again = read_tuning(tmp_path)
    assert repr(again) == repr(tuning)
    assert repr(tuning).startswith(f"Tuning('{tmp_path}')")
    assert tuning.best["fedavg"].keys() == {"learning_rate"}
    assert len(again.frame()) == 2
    assert "<table>" in again._repr_html_()
    assert [trial.label for trial in collect_runs([tmp_path]).trials] == [t.label for t in tuning.comparison.trials]


def test_the_importance_of_options_is_known_of_enough_trials(tmp_path: Path) -> None:
    # One option decides how far a step goes, the other next to nothing.
    space = "learning_rate=log(0.00001, 0.3), weight_decay=uniform(0, 1e-12)"
    tuning = tune(tmp_path, space=space, trials=10, rounds=1, prune=False, **LOSS)
    weights = tuning.methods[0]["importance"]
    assert weights["learning_rate"] > weights["weight_decay"]
    assert sum(weights.values()) == pytest.approx(1, abs=1e-3)


def test_validation_takes_the_place_of_the_test(tmp_path: Path) -> None:
    options: dict[str, Any] = {**tiny.OPTIONS, "model": "mlp", "rounds": 1, "evaluate_on": "validation"}
    run = fedkeel.simulate(directory=tmp_path / "run", federation=sites(), **options)
    assert {record["samples"] for record in run.records("evaluation")} == {12}
    assert collect_runs([run.directory]).table().splitlines()[-1].startswith("Validation accuracy in %")
    with pytest.raises(FedkeelError, match="has no validation samples"):
        fedkeel.simulate(directory=tmp_path / "none", federation=sites(validation=0.0), **options)
