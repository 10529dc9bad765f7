"""The ledger: what a line says, that it survives, and when it is stale."""

import json
from pathlib import Path

import pytest

from fedkeel.config import Config
from fedkeel.errors import FedkeelError
from fedkeel.experiments.recipes import Recipe, load
from fedkeel.runs.run import Run
from fedkeel.simulation import simulate
from tests.tools.lines import RECIPE, line, small

from ledger import RESULTS, Ledger, Line, line_of, lines_in, version_of  # isort: skip


def a_line(recipe: Recipe, place: Path) -> tuple[Line, Run]:
    row, column = next(recipe.cells())
    config: Config = recipe.config(row, column)
    run = simulate(config.replace(executor="serial"), directory=place, verbose=False)
    return line_of(recipe, row, column, run, version_of(recipe, row, column), "abc"), run


class TestLines:
    @pytest.mark.slow
    def test_a_finished_cell_becomes_a_line_with_every_rule(self, tmp_path: Path) -> None:
        line, run = a_line(small(), tmp_path / "run")
        assert (line.recipe, line.row, line.column, line.seed) == ("small", "FedAvg", "digits scan", 0)
        assert (line.rounds, line.of, line.rule, line.commit) == (2, 2, "last", "abc")
        by_round = [100 * entry["domains"]["scan"] for entry in run.scores()]
        averages = [entry["average"] for entry in run.scores()]
        mean = sum(by_round) / len(by_round)
        expected = {"last": by_round[-1], "mean-last-10": mean, "every-round": mean}
        expected["best-round"] = by_round[averages.index(max(averages))]
        for rule, value in expected.items():
            assert line.results[rule] == pytest.approx(value, abs=1e-3)
        assert line.domains.keys() == run.domains.keys()
        assert line.seconds > 0
        assert line.torch
        assert line.device
        assert line.stale(small()) == ""
        Ledger(tmp_path).add([line])
        assert next(iter(Ledger(tmp_path))).results == line.results

    @pytest.mark.slow
    def test_domains_are_those_under_the_statistics_that_the_cell_reads(self, tmp_path: Path) -> None:
        text = RECIPE.replace('label = "scan", domain = "scan"', 'label = "scan", statistics = "batch"')
        line, _ = a_line(small(text.replace("rounds = 2", 'rounds = 2\nevaluate_with = "both"')), tmp_path / "run")
        assert line.value == pytest.approx(sum(filter(None, line.domains.values())) / len(line.domains), abs=1e-3)


class TestStale:
    def test_another_recipe(self) -> None:
        old = line("GN", "digits scan", 0, 50.0)
        assert old.stale(small(RECIPE.replace("batch_size = 5", "batch_size = 6"))) == "the recipe has changed"
        assert old.stale(small(RECIPE.replace("batch_size = 5", 'batch_size = 5\nexecutor = "serial"'))) == ""
        assert old.stale(small(RECIPE.replace('"GN"', '"Group"').replace("GN  ", "Group"))) != ""

    def test_what_is_set_to_its_default_is_set_and_what_is_read_counts_too(self) -> None:
        for old, new in (("rounds = 2", "rounds = 2\nmomentum = 0.9"), ('domain = "scan"', 'domain = "street"')):
            recipe, other = small(), small(RECIPE.replace(old, new))
            assert version_of(recipe, recipe.rows[0], recipe.columns[0]) != version_of(
                other, other.rows[0], other.columns[0]
            )

    def test_stale_and_doubtful_lines_are_not_mixed_in(self, tmp_path: Path) -> None:
        ledger = Ledger(tmp_path)
        old = line("GN", "digits scan", 0, 50.0, version="of before")
        broken = line("GN", "digits scan", 2, 50.0, doubt="the card was broken")
        ledger.add([old, line("GN", "digits scan", 1, 60.0), broken])
        fresh, stale = ledger.of(small())
        assert [entry.value for entry in fresh] == [60.0]
        assert stale == {old: "the recipe has changed", broken: "the card was broken"}


class TestFile:
    def test_of_two_lines_for_one_cell_the_last_counts(self, tmp_path: Path) -> None:
        Ledger(tmp_path).add([line("GN", "digits scan", 0, 50.0)])
        Ledger(tmp_path).add([line("GN", "digits scan", 0, 51.0)])
        (found,) = Ledger(tmp_path)
        assert found.value == 51.0
        assert len((tmp_path / "small.jsonl").read_text().splitlines()) == 2

    @pytest.mark.parametrize("text", ["[1]", '{"recipe": "small"', '{"recipe": "small"}'])
    def test_a_line_that_is_none_is_named(self, text: str, tmp_path: Path) -> None:
        Ledger(tmp_path).add([line("GN", "digits scan", 0, 50.0)])
        path = tmp_path / "small.jsonl"
        path.write_text(path.read_text() + text + "\n")
        with pytest.raises(FedkeelError, match=r"Line 2 of '.*small.jsonl' is no result"):
            Ledger(tmp_path)

    def test_the_lines_that_are_there_are_of_recipes_that_are_there(self) -> None:
        for path in RESULTS.glob("*.jsonl"):
            first = json.loads(path.read_text().splitlines()[0])
            assert first["recipe"].replace("/", "-") == path.stem
            cells = {(row.label, column.name) for row, column in load(first["recipe"]).cells()}
            assert {(line.row, line.column) for line in lines_in(path)} <= cells
