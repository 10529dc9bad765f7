"""Where a model has diverged the run ends as any other, with a note and a dash; so it does where there is no test."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeel import analysis, report
from fedkeel.cli import main
from fedkeel.core.evaluation import Evaluation, summarise
from fedkeel.core.types import Output
from fedkeel.data.federation import Federation
from fedkeel.errors import FedkeelError, quoted
from fedkeel.experiments.comparison import collect_runs
from fedkeel.models import Classifier
from fedkeel.runs.run import Run
from fedkeel.runs.summary import unsound
from fedkeel.runs.trackers import values
from tests import tiny

FORMATS = ("text", "markdown", "latex", "csv")


class Overflows(Classifier):
    """Its logits are infinite on an image that is white all over, in tests alone."""

    def forward(self, x: Tensor) -> Output:
        output = super().forward(x)
        white = (x.amin(dim=(1, 2, 3)) >= 1)[:, None] & (not self.training)
        return Output(output.features, torch.where(white, torch.inf, output.logits))


def overflowing() -> Classifier:
    usual = tiny.model()
    return Overflows(usual.encoder, usual.head, usual.feature_dim, 4)


def whitened(*names: str, validation: int = 4) -> Federation:
    """The tests of these clients are white all over."""
    federation = tiny.federation(validation=validation)
    for name in names:
        federation.images[federation[name].test] = 255
    return federation


def diverged(directory: Path, *names: str, **options: Any) -> tuple[Run, list[str]]:
    notes = tiny.Notes()
    run = tiny.run(directory, network=overflowing(), on=whitened(*names), observer=notes, **options)
    return run, notes.notes


class TestDiverged:
    @pytest.mark.parametrize("result", ["last", "mean-last-10", "best-validation"])
    def test_it_finishes_and_a_note_names_the_round_and_the_domains(self, tmp_path: Path, result: str) -> None:
        run, notes = diverged(tmp_path / "run", "ward", "hospital", result=result)
        told = [note for note in notes if "not finite" in note]
        assert len(told) == 1  # not in every round
        assert told[0].startswith("Round 1: the evaluated loss on 'bright', 'tinted' is not finite")
        assert run.summary is not None
        assert run.summary["diverged_domains"] == ["bright", "tinted"]
        assert 0 <= run.accuracy <= 1

    def test_the_others_keep_their_numbers_and_the_mean_is_theirs(self, tmp_path: Path) -> None:
        run, _ = diverged(tmp_path / "run", "ward")
        last = [e for e in run.records("evaluation") if e["round"] == 2 and e["split"] == "test"]
        assert [e["loss"] is None for e in last] == [True, False, False]
        others = [e for e in last if e["loss"] is not None]
        expected = sum(e["loss"] * e["samples"] for e in others) / sum(e["samples"] for e in others)
        assert run.scores()[-1]["loss"] == pytest.approx(expected)
        usual = tiny.run(tmp_path / "usual", on=whitened("ward"))
        assert run.domains["dark"] == usual.domains["dark"]

    def test_where_all_diverged_there_is_no_loss_and_everything_that_shows_a_run_goes_on(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run, _ = diverged(tmp_path / "run", *tiny.SIZES)
        assert run.summary is not None
        assert run.summary["loss"] is None
        assert run.scores()[-1]["loss"] is None
        assert main(["show", str(run.directory)]) == 0
        assert "loss    – not finite on bright, dark, tinted" in capsys.readouterr().out
        results = collect_runs([run.directory]).results
        for kind in FORMATS:
            text = getattr(results, kind)()
            assert "Diverged, the test loss is not finite: fedavg on bright, dark, tinted." in text or kind == "csv"
        assert results.to_dict()["rows"][0]["diverged_domains"] == ["bright", "dark", "tinted"]
        page = report.write([run.directory])
        assert "Diverged, the test loss is not finite" in page.read_text()

    def test_the_table_of_pandas_has_no_number_there(self, tmp_path: Path) -> None:
        pytest.importorskip("pandas")
        frame = tiny.run(tmp_path / "run", network=overflowing(), on=whitened(*tiny.SIZES, validation=0)).frame()
        assert frame["loss"].dtype == float
        assert frame["loss"].isna().all()
        assert not frame["average"].isna().any()

    def test_a_run_that_was_stopped_so_goes_on(self, tmp_path: Path) -> None:
        run, _ = diverged(tmp_path / "run", "ward")
        (run.directory / "summary.json").unlink()
        again = tiny.resume(run.directory, network=overflowing(), on=whitened("ward"))
        assert again.domains == run.domains

    def test_a_diagnostic_that_needs_numbers_says_so_in_a_sentence(self, tmp_path: Path) -> None:
        run, _ = diverged(tmp_path / "run", *tiny.SIZES)
        network = overflowing()
        network.encoder.append(NotANumber())  # type: ignore[operator]
        with pytest.raises(FedkeelError, match="'nmi' cannot be computed"):
            analysis.run("nmi", run, federation=tiny.federation(), model=network, save=False)

    def test_a_tracker_gets_what_is_a_number(self) -> None:
        worst = Evaluation("a", "a", "test", "global", correct=1, samples=4, loss_sum=math.nan)
        scores = summarise([worst])
        assert scores.loss is None
        assert scores.average == 0.25
        assert "test/loss" not in values(scores, 1.0)

    @pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1.7e308])
    def test_a_site_that_sends_such_a_loss_changes_nothing_for_the_others(self, loss: float) -> None:
        honest = Evaluation("a", "a", "test", "global", correct=3, samples=4, loss_sum=2.0)
        liars = [replace(honest, client=name, domain=name, loss_sum=loss) for name in "bc"]
        scores = summarise([honest, *liars])
        assert scores.domains["a"] == 0.75
        assert scores.loss == (0.5 if not math.isfinite(loss) else None)  # a sum beyond all numbers is none


class NotANumber(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.nan if not self.training else x


def lacking(split: str, *names: str) -> Federation:
    federation = tiny.federation()
    empty = torch.empty(0, dtype=torch.int64)
    clients = [replace(c, **{split: empty}) if c.name in names else c for c in federation.clients]
    return replace(federation, clients=clients)


class TestUntested:
    @pytest.mark.parametrize("method", ["fedavg", "fedbn", "central", "standalone"])
    def test_a_site_without_test_images_is_in_the_table_with_a_dash(
        self, tmp_path: Path, method: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run = tiny.run(tmp_path / "run", method, on=lacking("test", "clinic"))
        assert run.summary is not None
        assert run.summary["untested_domains"] == ["dark"]
        assert run.accuracy == pytest.approx((run.domains["bright"] + run.domains["tinted"]) / 2)
        results = collect_runs([run.directory]).results
        assert results.domains == ["bright", "tinted", "dark"]
        for kind in ("text", "markdown", "latex"):
            text = getattr(results, kind)()
            row = next(line for line in text.splitlines() if line.lstrip("| ").startswith(method))
            assert ("--" if kind == "latex" else "–") in row
            assert "Not tested, –: dark." in text
        assert "dark_mean" in results.csv()
        assert results.to_dict()["untested_domains"] == ["dark"]
        assert main(["show", str(run.directory)]) == 0
        shown = capsys.readouterr().out
        assert any(line.split() == ["dark", "–"] for line in shown.splitlines())
        assert "– not tested: dark" in shown
        assert "Not tested, –: dark." in report.write([run.directory]).read_text()

    def test_who_has_no_validation_images_has_no_say_in_which_round_was_best(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run", on=lacking("validation", "ward", "clinic"), result="best-validation")
        assert sorted(run.domains) == ["bright", "dark", "tinted"]
        assert run.summary is not None
        best = max(run.scores("validation"), key=lambda e: (e["average"], -e["round"]))
        assert run.summary["round"] == best["round"]

    def test_a_summary_with_something_else_there_is_refused(self, tmp_path: Path) -> None:
        run = tiny.run(tmp_path / "run", on=lacking("test", "clinic"))
        assert run.summary is not None
        assert unsound(run.summary) == ""
        assert unsound({**run.summary, "untested_domains": 3}) == "'untested_domains' is '3'"


def test_of_very_many_names_the_first_are_told() -> None:
    assert quoted([str(n) for n in range(1000)], 2) == "'0', '1' and 998 more"
