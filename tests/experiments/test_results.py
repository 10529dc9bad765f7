"""The table of a comparison, or of runs from anywhere, says what the runs say."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest
from torch import nn

from fedkeel.cli import main
from fedkeel.cli.terminal.console import drawn
from fedkeel.config import Config
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import Comparison, collect_runs, read_comparison, write_index
from fedkeel.experiments.findings import findings
from fedkeel.experiments.jobs import Job, Trial
from fedkeel.models import wrap
from fedkeel.report.collect import collect
from tests import tiny
from tests.experiments.made_up import finish
from tests.runs.test_origin import Scaled


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
            "fedavg": [(0.5, 0.7), (0.6, 0.8), (0.55, 0.75)],
            "fedbn": [(0.4, 0.9), (0.4, 0.9), (0.4, 0.9)],
            "central": [(0.9, 0.9), (1, 1), (1, 1)],
        }
        for method, rows in numbers.items():
            for seed, (scan, street) in enumerate(rows):
                finish(
                    place / method / f"seed{seed}", Config(method=method, seed=seed), {"scan": scan, "street": street}
                )
        runs = [{"method": m, "seed": s, "directory": f"{m}/seed{s}"} for m in numbers for s in range(3)]
        (place / "comparison.json").write_text(json.dumps({"runs": runs}))
        return read_comparison(place)

    def test_without_a_finished_run_every_format_says_so(self, tmp_path: Path) -> None:
        unfinished = Comparison(tmp_path, [Trial("fedavg", 0, tmp_path / "fedavg"), Trial("gn", 1, tmp_path / "gn")])
        for text in (unfinished.table(), unfinished.markdown(), unfinished.results.latex()):
            assert "No run is finished yet." in text
            assert "average" in text
            assert "ahead" not in text
        assert unfinished.csv() == "method,seeds,average_mean,average_std\n"
        assert unfinished.rows() == unfinished.runs == []
        assert unfinished.missing == ["fedavg seed 0", "gn seed 1"]
        assert unfinished.to_dict()["rows"] == []
        assert findings(unfinished.results) == []
        drawn(unfinished.results)

    def test_mean_and_spread_are_those_of_the_seeds(self, tmp_path: Path) -> None:
        row = self.comparison(tmp_path).rows()[0]
        assert row["method"] == "fedavg"
        assert row["domains"]["scan"] == pytest.approx({"mean": 0.55, "std": statistics.stdev([0.5, 0.6, 0.55])})
        assert row["average"] == pytest.approx({"mean": 0.65, "std": statistics.stdev([0.6, 0.7, 0.65])})

    def test_the_best_of_a_column_is_marked_and_the_upper_bound_does_not_compete(self, tmp_path: Path) -> None:
        lines = self.comparison(tmp_path).markdown().splitlines()
        assert lines[0] == "| method | scan | street | average |"
        assert lines[2] == "| fedavg | **55.0 ±5.0** | 75.0 ±5.0 | 65.0 ±5.0 |"
        assert lines[3] == "| fedbn | 40.0 ±0.0 | **90.0 ±0.0** | 65.0 ±0.0 |"
        assert "**" not in lines[4]

    def test_text_and_csv_hold_every_number(self, tmp_path: Path) -> None:
        comparison = self.comparison(tmp_path)
        assert "55.0 ±5.0*" in comparison.table()
        assert "the last round" in comparison.table()
        assert "3 seeds" in comparison.table()
        header, first, *_ = comparison.csv().splitlines()
        assert header == "method,seeds,scan_mean,scan_std,street_mean,street_std,average_mean,average_std"
        assert first.startswith("fedavg,3,")
        assert float(first.split(",")[2]) == pytest.approx(0.55)
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
        assert "| hbn | 50.0 ±0.0 | 50.0 ±0.0 | 94.5 | 3 |" in both.markdown()
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
