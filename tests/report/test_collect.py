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
from fedkeel.report.collect import Group, Metric
from fedkeel.report.sections import federation_names
from tests.report.samples import DOMAINS, accuracy, make_comparison, make_run


def metric(group: Group, key: str) -> Metric:
    return next(metric for metric in group.metrics if metric.key == key)


def rounds(group: Group, key: str) -> list[int]:
    return [*group.curve("fedavg", metric(group, key))]


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
    curve = group.curve("fedavg", metric(group, "domain sketch"))
    values = [[accuracy("fedavg", seed, 1, round, 6) for seed in range(3)] for round in range(6)]
    assert [*curve] == list(range(6))
    assert [cell.mean for cell in curve.values()] == pytest.approx([statistics.fmean(v) for v in values])
    assert [cell.std for cell in curve.values()] == pytest.approx([statistics.stdev(v) for v in values])


def test_how_evenly_domains_are_served_and_what_a_round_costs_have_curves(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", rounds=2)
    (run / "timing.jsonl").write_text('{"round": 0, "train": 2.0, "evaluate": 1.5, "clients": {"a": 1.0}}\n')
    (member,) = collect([run]).members
    found = {metric.key: curve for metric, curve in member.curves.items()}
    trained = [accuracy("fedavg", 0, domain, 1, 2) for domain in range(3)]
    assert found["worst"][1] == min(trained)
    assert found["spread"][1] == pytest.approx(statistics.stdev(trained))
    assert found["traffic"] == {0: 1.0, 1: 1.0}
    assert found["seconds"] == {0: 3.5}


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
    seeds = [len(cell.by_seed) for cell in group.curve("fedavg", metric(group, "average")).values()]
    assert seeds == [2] * 5 + [1] * 3
    assert group.results.rows[0].seeds == [0]
    (notice,) = collected.notices
    assert "fedavg, seed 1 (5 of 8 rounds)" in notice
    assert f"fedkeel resume {tmp_path / 'b'}" in notice


def test_missing_rounds_are_a_gap_and_no_error(tmp_path: Path) -> None:
    make_run(tmp_path / "a", skipped=(0, 3, 4))
    assert rounds(collect([tmp_path / "a"]).groups[0], "average") == [1, 2, 5, 6, 7]


def test_runs_that_have_not_begun_are_named(tmp_path: Path) -> None:
    make_comparison(tmp_path / "c", ("fedavg", "fedbn"), seeds=1)
    index = json.loads((tmp_path / "c" / "comparison.json").read_text())
    index["runs"].append({"method": "gn", "seed": 4, "directory": "gn/seed4"})
    (tmp_path / "c" / "comparison.json").write_text(json.dumps(index))
    collected = collect([tmp_path / "c"])
    assert collected.notices == ["Not started yet: gn seed 4."]
    assert collected.groups[0].labels == ["fedavg", "fedbn"]
    assert "0 of 8 rounds" in collect([make_run(tmp_path / "empty", done=0)]).notices[0]


class TestDifferentData:
    def test_runs_of_two_data_sets_are_never_in_one_table_and_it_is_said(self, tmp_path: Path) -> None:
        make_run(tmp_path / "a", "fedavg")
        make_run(tmp_path / "b", "fedavg", data="pacs", domains=("art", "cartoon"))
        collected = collect([tmp_path / "a", tmp_path / "b"])
        assert [group.results.domains for group in collected.groups] == [[*DOMAINS], ["art", "cartoon"]]
        assert [group.labels for group in collected.groups] == [["fedavg"], ["fedavg"]], "the heading names the data"
        assert "2 different federations (data differ)" in collected.notices[0]

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
        names = [f"{long.format(16)}, subsample 50", "pacs", f"{long.format(32)}, subsample 50"]
        assert federation_names(collect([tmp_path]).groups) == names

    @pytest.mark.parametrize("options", [{"partition": "dirichlet(alpha=0.1, clients=4)"}, {"subsample": 50}])
    def test_so_are_other_cuts_of_one_data_set(self, tmp_path: Path, options: dict[str, object]) -> None:
        make_run(tmp_path / "a")
        make_run(tmp_path / "b", **options)
        assert len(collect([tmp_path]).groups) == 2


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
        make_run(tmp_path / "a")
        make_run(tmp_path / "b")
        (group,) = collect([tmp_path, tmp_path / "b"]).groups
        assert group.results.rows[0].seeds == [0]
        assert {len(cell.by_seed) for cell in group.curve("fedavg", metric(group, "average")).values()} == {1}


class TestBrokenFiles:
    @pytest.mark.parametrize(
        "text", ["{", "[]", '{"accuracy": null, "domains": {}, "result": "last"}', '{"seconds": "many"}']
    )
    def test_a_summary_that_no_run_writes_is_told_and_the_run_shown_without_it(self, tmp_path: Path, text: str) -> None:
        (make_run(tmp_path / "a") / "summary.json").write_text(text)
        collected = collect([tmp_path / "a"])
        assert collected.members[0].summary is None
        assert "summary.json" in collected.notices[0]
        assert write([tmp_path / "a"]).exists()

    def test_metrics_that_no_run_writes_cost_the_curves_and_not_the_table(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "a") / "metrics.jsonl"
        path.write_text(path.read_text().replace('"domains"', '"sites"'))
        collected = collect([tmp_path / "a"])
        assert collected.notices
        assert len(collected.groups[0].results.rows) == 1

    def test_a_loss_that_was_not_a_number_is_a_gap(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "a") / "metrics.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            if line["kind"] == "round" and line["round"] == 2:
                line["loss"] = None
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert rounds(collect([tmp_path / "a"]).groups[0], "train-loss") == [0, 1, 3, 4, 5, 6, 7]

    def test_a_last_line_that_was_not_written_to_its_end_is_not_worth_a_word(self, tmp_path: Path) -> None:
        path = make_run(tmp_path / "a", done=6) / "metrics.jsonl"
        path.write_bytes(path.read_bytes()[:-20] + b"\xc3")  # in the middle of a letter
        collected = collect([tmp_path])
        assert rounds(collected.groups[0], "average") == list(range(6))
        assert rounds(collected.groups[0], "train-loss") == list(range(5))
        assert [notice.partition(":")[0] for notice in collected.notices] == ["Not finished"]

    @pytest.mark.parametrize("text", ["NaN", "Infinity", "1e999", "null"])
    def test_losses_of_a_run_that_diverged_cost_only_their_curve(self, tmp_path: Path, text: str) -> None:
        path = make_run(tmp_path / "a") / "metrics.jsonl"
        path.write_text(re.sub(r'"loss": [\d.]+', f'"loss": {text}', path.read_text()))
        (group,) = collect([tmp_path]).groups
        assert not {"test-loss", "train-loss"} & {m.key for m in group.metrics}
        assert rounds(group, "average") == list(range(8))
        assert write([tmp_path / "a"]).exists()

    def test_no_run_at_all_is_an_error_in_one_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(FedkeelError, match="not a run directory"):
            collect([tmp_path])
        with pytest.raises(FedkeelError, match="nothing to report"):
            collect([])
