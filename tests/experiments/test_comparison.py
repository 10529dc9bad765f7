"""What is compared is checked before anything trains, may be objects, and finds its directory again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
from torch import nn

from fedkeel.config import Config
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import compare
from tests import tiny
from tests.experiments.made_up import TINY, Watching, finish
from tests.runs.test_origin import Scaled

comparing = sys.modules["fedkeel.experiments.comparison"]  # the name in the package is the function


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
            (["fedavg", "gn@model=simple_cnn(norm=false)"], {}, "batch norm"),
            (["fedavg", "fedbn"], {"stateless": True}, "stateless"),
            (["fedavg", "fedavg"], {}, "twice"),
            ([], {}, "give a list of methods"),
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
        with pytest.raises(FedkeelError, match=r"holds another run \(learning_rate is 0.5 there and 0.01 here\)"):
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

    @pytest.mark.parametrize(
        ("other", "since"),
        [
            ({"model": tiny.model(width=5)}, "its network began with other weights"),
            ({"model": tiny.model(seed=1)}, "its network began with other weights"),
            ({"federation": tiny.federation(seed=1)}, "its data have changed"),
        ],
    )
    def test_what_began_with_another_object_is_not_taken_for_this(
        self, tmp_path: Path, other: dict[str, Any], since: str
    ) -> None:
        options = {**self.OPTIONS, "seeds": 1, "federation": tiny.federation(), "model": tiny.model()}
        compare(["fedavg"], directory=tmp_path, **options)
        watching = Watching()
        compare(["fedavg"], directory=tmp_path, observer=watching, **options)
        assert watching.started == []
        with pytest.raises(FedkeelError, match=rf"seed0' holds another run \({since}"):
            compare(["fedavg"], directory=tmp_path, **{**options, **other})

    @pytest.mark.slow
    def test_processes_have_them_too(self, tmp_path: Path) -> None:
        options = {**self.OPTIONS, "federation": tiny.federation(), "model": tiny.model(), "jobs": 2}
        assert len(compare([Scaled(0.5), "fedavg"], directory=tmp_path, **options).runs) == 4

    def test_what_is_of_another_kind_is_refused(self, tmp_path: Path) -> None:
        refused: list[tuple[Any, dict[str, Any], str]] = [
            ([Scaled], {}, "What to compare has"),
            ([Scaled(0.5), Scaled(0.5)], {}, "is given twice: keep one"),
            (["fedavg"], {"federation": "digits-shift"}, "'federation' is 'digits-shift': give a"),
            (["fedavg"], {"model": nn.Linear}, "give a network"),
            (["fedavg"], {"federation": tiny.federation(), "data": "folder"}, "object together with data='folder'"),
            (["fedavg"], {"federation": tiny.federation(), "unseen": "a"}, "object together with unseen='a'"),
            (["fedavg@model=mlp"], {"model": tiny.model()}, "object together with model='mlp'"),
            (Scaled(0.5), {}, "give a list of methods"),
            (["fedavg"], {"verbose": "no"}, "'verbose' is 'no': give True, False, or nothing"),
        ]
        for methods, options, wanted in refused:
            with pytest.raises(FedkeelError, match=wanted):
                compare(methods, directory=tmp_path, **options)
