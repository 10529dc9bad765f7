"""The ledger: what a line says, that it survives, and when it is stale."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedkeel.errors import FedkeelError
from fedkeel.experiments.ledger import Ledger, version_of
from fedkeel.experiments.reproduce import reproduce
from fedkeel.runs.run import Run
from tests.experiments.lines import RECIPE, line, small


class TestLines:
    @pytest.mark.slow
    def test_a_finished_cell_becomes_a_line_with_every_rule(self, tmp_path: Path) -> None:
        recipe, ledger = small(), tmp_path / "results"
        options = {"directory": tmp_path / "runs", "jobs": 1, "ledger": ledger, "seeds": 1}
        result = reproduce(recipe, only=["GN"], **options)
        found = {entry.column: entry for entry in Ledger(ledger)}
        assert list(found) == ["digits scan", "digits paper"]
        scan = found["digits scan"]
        assert (scan.recipe, scan.row, scan.seed, scan.rounds, scan.of) == ("small", "GN", 0, 2, 2)
        assert scan.value == pytest.approx(result.cells["GN", "digits scan"].mean, abs=1e-3)
        run = Run(next((tmp_path / "runs").glob("*/seed0")))
        by_round = [100 * entry["domains"]["scan"] for entry in run.scores()]
        averages = [entry["average"] for entry in run.scores()]
        assert scan.results["last"] == pytest.approx(by_round[-1], abs=1e-3)
        assert scan.results["mean-last-10"] == pytest.approx(sum(by_round) / 2, abs=1e-3)
        assert scan.results["every-round"] == pytest.approx(sum(by_round) / len(by_round), abs=1e-3)
        assert scan.results["best-round"] == pytest.approx(by_round[averages.index(max(averages))], abs=1e-3)
        assert scan.domains.keys() == run.domains.keys()
        assert scan.seconds > 0
        assert scan.torch
        assert scan.device
        assert scan.stale(recipe) == ""
        # The same again says nothing new, and a run that is there already becomes lines too.
        before = (ledger / "small.jsonl").read_bytes()
        reproduce(recipe, only=["GN"], **options)
        assert (ledger / "small.jsonl").read_bytes() == before
        (ledger / "small.jsonl").unlink()
        reproduce(recipe, only=["GN"], **options)
        assert (ledger / "small.jsonl").read_bytes() == before

    @pytest.mark.slow
    def test_domains_are_those_under_the_statistics_that_the_cell_reads(self, tmp_path: Path) -> None:
        text = RECIPE.replace('label = "scan", domain = "scan"', 'label = "scan", statistics = "batch"')
        recipe = small(text.replace("rounds = 2", 'rounds = 2\nevaluate_with = "both"'))
        options = {"directory": tmp_path / "runs", "jobs": 1, "ledger": tmp_path / "results", "seeds": 1}
        reproduce(recipe, only=["FedAvg", "scan"], **options)
        (found,) = Ledger(tmp_path / "results")
        assert found.value == pytest.approx(sum(found.domains.values()) / len(found.domains), abs=1e-3)
        assert found.statistics["batch"] == found.value
        assert found.statistics.keys() == {"global", "batch"}

    def test_a_quick_look_and_a_change_are_told(self, tmp_path: Path) -> None:
        options = {"directory": tmp_path / "runs", "jobs": 1, "ledger": tmp_path / "results", "seeds": 1}
        reproduce(small(), only=["GN", "scan"], scale=0.5, precision="float32", **options)
        (found,) = Ledger(tmp_path / "results")
        assert (found.rounds, found.of, found.is_whole, found.changes) == (1, 2, False, {"precision": "float32"})
        assert found.stale(small()) == ""


class TestStale:
    def test_another_recipe(self) -> None:
        old = line("GN", "digits scan", 0, 50.0)
        assert old.stale(small(RECIPE.replace("batch_size = 5", "batch_size = 6"))) == "the recipe has changed"
        assert old.stale(small(RECIPE.replace("batch_size = 5", 'batch_size = 5\nexecutor = "serial"'))) == ""
        assert old.stale(small(RECIPE.replace('"GN"', '"Group"').replace("GN  ", "Group"))) != ""

    def test_an_option_that_is_set_to_its_default_is_set(self) -> None:
        recipe, other = small(), small(RECIPE.replace("rounds = 2", "rounds = 2\nmomentum = 0.9"))
        row, column = recipe.rows[0], recipe.columns[0]
        assert version_of(recipe, row, column) != version_of(other, row, column)

    def test_what_is_read_counts_too(self) -> None:
        recipe, other = small(), small(RECIPE.replace('domain = "scan"', 'domain = "street"'))
        row, column = recipe.rows[0], recipe.columns[0]
        assert version_of(recipe, row, column) != version_of(other, row, other.columns[0])

    def test_a_method_that_computes_something_else(self) -> None:
        now = line("GN", "digits scan", 0, 50.0)
        assert now.stale(small()) == ""
        then = line("GN", "digits scan", 0, 50.0, signature=tuple(1.001 * (loss or 0) for loss in now.signature))
        assert then.stale(small()) == "the method computes something else"

    def test_a_method_that_is_gone_or_whose_code_had_changed_before_the_line_was_written(self) -> None:
        for other in ({"signature": ()}, {"method": "nosuchmethod", "signature": ()}):
            assert line("GN", "digits scan", 0, 50.0, **other).stale(small()) == "the method computes something else"

    def test_stale_lines_are_not_mixed_in(self, tmp_path: Path) -> None:
        ledger = Ledger(tmp_path)
        old = line("GN", "digits scan", 0, 50.0, version="of before")
        ledger.add([old, line("GN", "digits scan", 1, 60.0)])
        fresh, stale = ledger.of(small())
        assert [entry.value for entry in fresh] == [60.0]
        assert stale == {old: "the recipe has changed"}

    def test_a_line_that_is_in_doubt_does_not_count(self, tmp_path: Path) -> None:
        ledger = Ledger(tmp_path)
        broken = line("GN", "digits scan", 0, 50.0, doubt="the card was broken")
        ledger.add([broken, line("GN", "digits scan", 1, 60.0)])
        fresh, stale = Ledger(tmp_path).of(small())
        assert [entry.value for entry in fresh] == [60.0]
        assert list(stale.values()) == ["the card was broken"]

    def test_what_was_in_doubt_counts_once_it_was_run_again_whatever_came_out(self, tmp_path: Path) -> None:
        again = line("GN", "digits scan", 0, 50.0)
        Ledger(tmp_path).add([replace(again, doubt="the card was broken", seconds=12.5)])
        ledger = Ledger(tmp_path)
        assert ledger.add([replace(again, seconds=12.5)]) == 0  # the run that is in doubt, found once more
        assert ledger.add([replace(again, seconds=12.6)]) == 1
        fresh, stale = Ledger(tmp_path).of(small())
        assert ([entry.value for entry in fresh], stale) == ([50.0], {})


class TestFile:
    def test_of_two_lines_for_one_experiment_the_last_counts(self, tmp_path: Path) -> None:
        Ledger(tmp_path).add([line("GN", "digits scan", 0, 50.0)])
        Ledger(tmp_path).add([line("GN", "digits scan", 0, 51.0)])
        (found,) = Ledger(tmp_path)
        assert found.value == 51.0
        assert len((tmp_path / "small.jsonl").read_text().splitlines()) == 2

    def test_a_line_that_a_kill_cut_off_is_written_again(self, tmp_path: Path) -> None:
        Ledger(tmp_path).add([line("GN", "digits scan", 0, 50.0), line("GN", "digits scan", 1, 51.0)])
        path = tmp_path / "small.jsonl"
        whole = path.read_bytes()
        for length in range(len(whole) - 2, whole.index(b"\n"), -97):
            path.write_bytes(whole[:length])
            ledger = Ledger(tmp_path)
            assert [entry.seed for entry in ledger] == [0]
            ledger.add([line("GN", "digits scan", 1, 51.0)])
            assert path.read_bytes() == whole

    def test_a_whole_line_without_its_end_is_kept(self, tmp_path: Path) -> None:
        Ledger(tmp_path).add([line("GN", "digits scan", 0, 50.0), line("GN", "digits scan", 1, 51.0)])
        path = tmp_path / "small.jsonl"
        path.write_bytes(path.read_bytes().rstrip())
        Ledger(tmp_path).add([line("GN", "digits scan", 2, 52.0)])
        assert [entry.seed for entry in Ledger(tmp_path)] == [0, 1, 2]

    def test_a_run_of_other_code_replaces_nothing(self, tmp_path: Path) -> None:
        ledger = Ledger(tmp_path)
        assert ledger.add([line("GN", "digits scan", 0, 50.0)]) == 1
        assert ledger.add([line("GN", "digits scan", 0, 40.0, signature=())]) == 0
        assert [entry.value for entry in Ledger(tmp_path)] == [50.0]

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            *(("rounds", "2"), ("rounds", None), ("results", [1]), ("results", {"last": "50"}), ("signature", None)),
            *(("changes", None), ("seconds", "x"), ("recipe", 3), ("seed", "0")),
        ],
    )
    def test_an_entry_of_another_kind_is_named(self, name: str, value: object, tmp_path: Path) -> None:
        Ledger(tmp_path).add([line("GN", "digits scan", 0, 50.0)])
        path = tmp_path / "small.jsonl"
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}) + "\n")
        with pytest.raises(FedkeelError, match=r"Line 1 of '.*small.jsonl' is no result"):
            Ledger(tmp_path)

    def test_a_line_that_is_none_is_named(self, tmp_path: Path) -> None:
        Ledger(tmp_path).add([line("GN", "digits scan", 0, 50.0)])
        path = tmp_path / "small.jsonl"
        path.write_text("[1]\n" + path.read_text())
        with pytest.raises(FedkeelError, match=r"Line 1 of '.*small.jsonl' is no result"):
            Ledger(tmp_path)

    def test_a_line_is_plain_json_with_the_agreed_keys(self, tmp_path: Path) -> None:
        Ledger(tmp_path).add([line("GN", "digits scan", 0, 50.0)])
        table = json.loads((tmp_path / "small.jsonl").read_text())
        assert {"recipe", "row", "column", "seed", "rounds", "of", "results"} <= table.keys()
