"""What a report is made from: the right runs in the right group, and everything that is odd about them said."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import read_comparison
from fedkeel.experiments.difference import UNDECIDED
from fedkeel.report import collect, write
from fedkeel.report.collect import Curve, Group
from fedkeel.report.sections import federation_names
from tests.report.samples import DOMAINS, accuracy, make_comparison, make_run


def metric(group: Group, key: str) -> object:
    return next(metric for metric in group.metrics if metric.key == key)


def test_a_comparison_is_one_group_in_the_order_of_its_table(tmp_path: Path) -> None:
    make_comparison(tmp_path / "c", ("fedbn", "fedavg"), seeds=3)
    collected = collect([tmp_path / "c"])
    assert collected.notices == []
    (group,) = collected.groups
    assert group.labels == ["fedbn", "fedavg"]
    assert [member.seed for member in group.of("fedavg")] == [0, 1, 2]
    assert [row.method for row in group.results.rows] == ["fedbn", "fedavg"]


def test_a_curve_is_mean_and_spread_over_seeds(tmp_path: Path) -> None:
    make_comparison(tmp_path / "c", ("fedavg",), seeds=3, rounds=6)
    (group,) = collect([tmp_path / "c"]).groups
    curve = group.curve("fedavg", metric(group, "domain sketch"))  # type: ignore[arg-type]
    values = [[accuracy("fedavg", seed, 1, round, 6) for seed in range(3)] for round in range(6)]
    assert curve.rounds == list(range(6))
    assert curve.mean == pytest.approx([statistics.fmean(v) for v in values])
    assert curve.std == pytest.approx([statistics.stdev(v) for v in values])
    assert curve.seeds == [3] * 6


def test_the_report_and_compare_know_the_same_test_images_and_decide_the_same(tmp_path: Path) -> None:
    make_comparison(tmp_path / "c", ("fedavg", "fedbn"), seeds=3)
    with open(tmp_path / "c" / "row0" / "seed0" / "metrics.jsonl", "a") as file:
        for name in DOMAINS:
            record = {"kind": "evaluation", "round": 7, "client": name, "domain": name, "split": "test"}
            file.write(json.dumps({**record, "statistics": "global", "samples": 2, "accuracy": 0.5}) + "\n")
    (group,), compared = collect([tmp_path / "c"]).groups, read_comparison(tmp_path / "c").results
    for results in (group.results, compared):
        assert results.images == dict.fromkeys(DOMAINS, 2)
        assert results.difference(*results.rows).verdict == UNDECIDED
        assert replace(results, images={}).difference(*results.rows).verdict != UNDECIDED


def test_an_interrupted_run_is_in_the_curves_as_far_as_it_came_and_not_in_the_table(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "fedavg", seed=0)
    make_run(tmp_path / "b", "fedavg", seed=1, done=5)
    collected = collect([tmp_path])
    (group,) = collected.groups
    assert group.curve("fedavg", metric(group, "average")).seeds == [2] * 5 + [1] * 3  # type: ignore[arg-type]
    assert group.results.rows[0].seeds == [0]
    (notice,) = collected.notices
    assert "fedavg, seed 1 (5 of 8 rounds)" in notice
    assert f"fedkeel resume {tmp_path / 'b'}" in notice


def test_missing_rounds_are_a_gap_and_no_error(tmp_path: Path) -> None:
    make_run(tmp_path / "a", skipped=(0, 3, 4))
    (group,) = collect([tmp_path / "a"]).groups
    assert group.curve("fedavg", metric(group, "average")).rounds == [1, 2, 5, 6, 7]  # type: ignore[arg-type]


def test_a_run_that_wrote_nothing_yet_is_named(tmp_path: Path) -> None:
    make_run(tmp_path / "a", done=0)
    collected = collect([tmp_path / "a"])
    assert collected.groups[0].metrics == []
    assert "0 of 8 rounds" in collected.notices[0]


def test_a_run_of_a_comparison_that_never_started_is_named(tmp_path: Path) -> None:
    make_comparison(tmp_path / "c", ("fedavg", "fedbn"), seeds=1)
    index = json.loads((tmp_path / "c" / "comparison.json").read_text())
    index["runs"].append({"method": "gn", "seed": 4, "directory": "gn/seed4"})
    (tmp_path / "c" / "comparison.json").write_text(json.dumps(index))
    collected = collect([tmp_path / "c"])
    assert collected.notices == ["Not started yet: gn seed 4."]
    assert collected.groups[0].labels == ["fedavg", "fedbn"]


class TestDifferentData:
    def test_runs_of_two_data_sets_are_never_in_one_table_and_it_is_said(self, tmp_path: Path) -> None:
        make_run(tmp_path / "a", "fedavg")
        make_run(tmp_path / "b", "fedavg", data="pacs", domains=("art", "cartoon"))
        collected = collect([tmp_path / "a", tmp_path / "b"])
        assert [group.results.domains for group in collected.groups] == [
            ["photo", "sketch", "clipart"],
            ["art", "cartoon"],
        ]
        assert [group.labels for group in collected.groups] == [["fedavg"], ["fedavg"]], "the heading names the data"
        assert "2 different federations (data differ)" in collected.notices[0]
        assert "not compared" in collected.notices[0]

    def test_a_folder_of_comparisons_is_no_attempt_to_compare_them(self, tmp_path: Path) -> None:
        make_comparison(tmp_path / "a", ("fedavg",), seeds=1)
        make_comparison(tmp_path / "b", ("fedavg",), seeds=1, data="pacs", domains=("art",))
        assert not any("federations" in notice for notice in collect([tmp_path]).notices)
        assert any("2 different federations" in n for n in collect([tmp_path / "a", tmp_path / "b"]).notices)

    def test_long_options_are_in_a_name_only_where_they_tell_two_apart(self, tmp_path: Path) -> None:
        long = "digits-shift(train_transform='resize(size={0})+flip', test_transform='resize(size={0})+flip')"
        make_run(tmp_path / "a", "fedavg", data=long.format(16), subsample=50)
        make_run(tmp_path / "b", "fedavg", data="pacs", domains=("art",))
        assert federation_names(collect([tmp_path]).groups) == ["digits-shift(…), subsample 50", "pacs"]
        make_run(tmp_path / "c", "fedavg", data=long.format(32), subsample=50)
        assert federation_names(collect([tmp_path]).groups) == [
            f"{long.format(16)}, subsample 50", "pacs", f"{long.format(32)}, subsample 50",
        ]  # fmt: skip

    @pytest.mark.parametrize("options", [{"partition": "dirichlet(alpha=0.1, clients=4)"}, {"subsample": 50}])
    def test_so_are_other_cuts_of_one_data_set(self, tmp_path: Path, options: dict[str, object]) -> None:
        make_run(tmp_path / "a")
        make_run(tmp_path / "b", **options)
        assert len(collect([tmp_path]).groups) == 2

    def test_federations_given_in_python_are_told_apart_by_their_domains(self, tmp_path: Path) -> None:
        python = "(given in Python)"
        make_run(tmp_path / "a", data=python)
        make_run(tmp_path / "b", "fedbn", data=python)
        make_run(tmp_path / "c", data=python, domains=("north", "south"))
        assert [group.labels for group in collect([tmp_path]).groups] == [["fedavg", "fedbn"], ["fedavg"]]


class TestNames:
    def test_what_runs_differ_in_is_in_their_names(self, tmp_path: Path) -> None:
        make_run(tmp_path / "a", "fedavg", batch_size=8)
        make_run(tmp_path / "b", "fedavg", batch_size=16)
        assert collect([tmp_path]).groups[0].labels == ["fedavg@batch_size=8", "fedavg@batch_size=16"]

    def test_two_comparisons_with_one_name_for_two_configurations_get_new_names(self, tmp_path: Path) -> None:
        make_comparison(tmp_path / "short", ("fedavg",), seeds=2, rounds=4)
        make_comparison(tmp_path / "long", ("fedavg",), seeds=2, rounds=8)
        (group,) = collect([tmp_path / "short", tmp_path / "long"]).groups
        assert group.labels == ["fedavg@rounds=4", "fedavg@rounds=8"]
        assert [len(row.seeds) for row in group.results.rows] == [2, 2]

    def test_a_copy_of_a_run_does_not_count_as_another_seed(self, tmp_path: Path) -> None:
        make_run(tmp_path / "a", done=3)
        make_run(tmp_path / "b")
        collected = collect([tmp_path, tmp_path / "b"])
        (group,) = collected.groups
        assert [member.run.directory.name for member in group.members] == ["b"], "the finished one counts"
        assert any("there twice" in notice for notice in collected.notices)


class TestBrokenFiles:
    def test_a_summary_that_cannot_be_read(self, tmp_path: Path) -> None:
        make_run(tmp_path / "a")
        for text in ("{", "[]", '{"accuracy": null, "domains": {}, "result": "last"}'):
            (tmp_path / "a" / "summary.json").write_text(text)
            collected = collect([tmp_path / "a"])
            assert collected.groups[0].members[0].summary is None
            assert "summary.json" in collected.notices[0]

    def test_metrics_that_are_something_else(self, tmp_path: Path) -> None:
        make_run(tmp_path / "a")
        (tmp_path / "a" / "metrics.jsonl").write_text("[1, 2]\n")
        collected = collect([tmp_path / "a"])
        assert collected.groups[0].metrics == []
        assert "metrics.jsonl" in collected.notices[0]

    def test_a_loss_that_was_not_a_number_is_a_gap(self, tmp_path: Path) -> None:
        make_run(tmp_path / "a")
        path = tmp_path / "a" / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "round" and line["round"] == 2:
                line["loss"] = None
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (group,) = collect([tmp_path / "a"]).groups
        assert group.curve("fedavg", metric(group, "train-loss")).rounds == [0, 1, 3, 4, 5, 6, 7]  # type: ignore[arg-type]

    def test_a_last_line_that_was_not_written_to_its_end_is_not_worth_a_word(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "a", done=6) / "metrics.jsonl"
        path.write_bytes(path.read_bytes()[:-20] + b"\xc3")  # in the middle of a letter
        collected = collect([tmp_path])
        (group,) = collected.groups
        assert group.curve("fedavg", metric(group, "average")).rounds == list(range(6))  # type: ignore[arg-type]
        assert group.curve("fedavg", metric(group, "train-loss")).rounds == list(range(5))  # type: ignore[arg-type]
        assert [notice.partition(":")[0] for notice in collected.notices] == ["Not finished"]

    @pytest.mark.parametrize("line", ["12", "[]", '{"round": 3}', '{"kind": "sco', "\xff\x00"])
    def test_a_line_that_is_no_record_is_a_gap_and_told(self, tmp_path: Path, line: str) -> None:
        path = make_run(tmp_path / "a") / "metrics.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([*lines[:6], line, "", *lines[7:]]) + "\n")  # in place of the scores of round 3
        collected = collect([tmp_path])
        (group,) = collected.groups
        assert group.curve("fedavg", metric(group, "average")).rounds == [0, 1, 2, 4, 5, 6, 7]  # type: ignore[arg-type]
        assert collected.notices == [f"'{path}' has a line that cannot be read: the curves have a gap there."]

    def test_a_finished_run_without_any_evaluation_is_in_the_table_and_it_is_told(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "a") / "metrics.jsonl"
        path.write_text("".join(line + "\n" for line in path.read_text().splitlines() if '"scores"' not in line))
        collected = collect([tmp_path])
        (group,) = collected.groups
        assert [m.key for m in group.metrics] == ["train-loss"]
        assert len(group.results.rows) == 1
        assert collected.notices == [
            f"'{path}' has no evaluated round: the run is in the table and has no curve of accuracy."
        ]

    @pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999", "null"])
    def test_losses_of_a_run_that_diverged_cost_only_their_curve(self, tmp_path: Path, text: str) -> None:
        path = make_run(tmp_path / "a") / "metrics.jsonl"
        path.write_text(re.sub(r'"loss": [\d.]+', f'"loss": {text}', path.read_text()))
        (group,) = collect([tmp_path]).groups
        assert not {"test-loss", "train-loss"} & {m.key for m in group.metrics}
        assert group.curve("fedavg", metric(group, "average")).rounds == list(range(8))  # type: ignore[arg-type]
        assert write([tmp_path / "a"]).exists()

    @pytest.mark.parametrize("key", ["seconds", "bytes_up", "rounds", "questions", "epsilon"])
    @pytest.mark.parametrize("value", ["many", None, float("nan"), 0])
    def test_a_count_in_a_summary_that_is_none_is_left_out(self, tmp_path: Path, key: str, value: object) -> None:
        path = make_run(tmp_path / "a") / "summary.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
        assert collect([tmp_path]).notices == []
        assert write([tmp_path / "a"]).exists()

    @pytest.mark.parametrize("bad", [{"accuracy": float("nan")}, {"domains": {}}, {"domains": {"photo": None}}])
    def test_a_summary_without_an_accuracy_is_none(self, tmp_path: Path, bad: dict[str, object]) -> None:
        path = make_run(tmp_path / "a") / "summary.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **bad}))
        collected = collect([tmp_path])
        assert "cannot be read" in collected.notices[0]
        assert collected.members[0].summary is None
        assert write([tmp_path / "a"]).exists()

    def test_no_run_at_all_is_an_error_in_one_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(FedkeelError, match="not a run directory"):
            collect([tmp_path])
        with pytest.raises(FedkeelError, match="nothing to report"):
            collect([])


def test_a_long_curve_is_thinned_evenly_and_keeps_its_ends() -> None:
    curve = Curve(list(range(1000)), [float(i) for i in range(1000)], [None] * 1000, [1] * 1000)
    few = curve.thinned(100)
    assert len(few.rounds) == 100
    assert few.rounds[0] == 0
    assert few.rounds[-1] == 999
    assert few.mean == [float(i) for i in few.rounds]
    steps = {b - a for a, b in zip(few.rounds, few.rounds[1:], strict=False)}
    assert max(steps) - min(steps) <= 1
    assert curve.thinned(1000) is curve
