"""Running a recipe: a cell that is done is never run again, what cannot run is told, and the numbers are the runs'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedkeel.cli import main
from fedkeel.errors import FedkeelError
from fedkeel.experiments.paper_table import Reproduction
from fedkeel.experiments.recipes import Recipe, load, names, parse
from fedkeel.experiments.reproduce import choose_seeds, directory_name, epoch_seconds, reproduce, select
from fedkeel.runs.run import Run
from fedkeel.runs.summary import summarise_run
from tests.experiments.made_up import Watching, finish

RECIPE = """
paper = "HBN"
table = "Table 0"
caption = "Two methods on two domains"
measure = "Accuracy in %"
protocol = "Section 0"
seeds = [3, 4]
diagnostics = ["label-distribution"]
columns = [
    { group = "digits", label = "scan", domain = "scan" },
    { group = "digits", label = "paper", domain = "paper" },
    { group = "digits", label = "Avg.", average = true },
    { group = "more", label = "bigger", batch_size = 8 },
    { group = "more", label = "pictures", data = "pacs" },
]
rows = [
    { label = "FedAvg", method = "fedavg" },
    { label = "GN", method = "gn" },
    { label = "Future", method = "nosuchmethod" },
]
[base]
data = "digits-shift"
rounds = 2
subsample = 10
batch_size = 5
model = "simple_cnn(width=2)"
device = "cpu"
[published]
FedAvg = "10.0 20.0 15.0 50.0 1.0"
GN     = "30.0 40.0 35.0 60.0 2.0"
Future = "50.0 60.0 55.0 70.0 3.0"
"""


@pytest.fixture
def recipe() -> Recipe:
    return parse("small", RECIPE)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture
def run(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Reproduction, list[str]]]:
    """Reproduces the small recipe, and tells which runs were started."""
    monkeypatch.delenv("FEDKEEL_DATA", raising=False)

    def act(**options: Any) -> tuple[Reproduction, list[str]]:
        watching = Watching()
        result = reproduce(recipe, directory=tmp_path / "runs", jobs=1, observer=watching, **options)
        return result, watching.started

    return act


def by_hand(recipe: Recipe, place: Path, row: str, column: str, seed: int, **accuracies: float) -> None:
    """A finished run of a cell."""
    rows, columns = {r.label: r for r in recipe.rows}, {c.name: c for c in recipe.columns}
    config = recipe.config(rows[row], columns[column])
    finish(place / directory_name(config) / f"seed{seed}", config.replace(seed=seed), accuracies)


class TestRunning:
    @pytest.mark.slow
    def test_a_cell_that_is_done_is_never_run_again(self, run: Callable[..., Any]) -> None:
        first, started = run(only=["FedAvg", "GN", "digits"], seeds=1)
        # Three columns, one of them an average, are read from one run of each method.
        assert started == ["FedAvg, digits scan seed 3 from 0", "GN, digits scan seed 3 from 0"]
        again, started = run(only=["FedAvg", "GN", "digits"], seeds=1)
        assert started == []
        assert again.to_dict() == first.to_dict()
        _, started = run(only=["GN", "digits", "bigger"], seeds=2)
        assert started == [
            "GN, digits scan seed 4 from 0",
            "GN, more bigger seed 3 from 0",
            "GN, more bigger seed 4 from 0",
        ]

    def test_an_average_asked_for_alone_runs_its_parts(self, run: Callable[..., Any]) -> None:
        result, started = run(only=["FedAvg", "Avg."], seeds=1)
        assert len(started) == 1
        assert [column.name for column in result.columns] == ["digits Avg."]
        assert result.cells["FedAvg", "digits Avg."].mean is not None

    @pytest.mark.slow
    def test_cells_in_processes_of_their_own_give_the_same(self, recipe: Recipe, tmp_path: Path) -> None:
        options: dict[str, Any] = {"only": ["FedAvg", "GN", "digits"], "seeds": 1, "rounds": 1}
        alone = reproduce(recipe, directory=tmp_path / "alone", jobs=1, **options)
        together = reproduce(recipe, directory=tmp_path / "together", jobs=2, **options)
        assert {**alone.to_dict(), "directory": ""} == {**together.to_dict(), "directory": ""}
        assert not together.failures

    @pytest.mark.slow
    def test_what_cannot_run_is_told_in_one_sentence_and_the_rest_runs(self, run: Callable[..., Any]) -> None:
        result, started = run(seeds=1)
        assert started == [
            "FedAvg, digits scan seed 3 from 0",
            "FedAvg, more bigger seed 3 from 0",
            "GN, digits scan seed 3 from 0",
            "GN, more bigger seed 3 from 0",
        ]
        assert len(result.skipped) == 2
        assert result.skipped[1].startswith("Skipped: There is no method named 'nosuchmethod'")
        assert "'pacs' needs its data" in result.skipped[0]
        assert str(result.cells["Future", "digits scan"]) == "– / 50.0 / –"
        assert str(result.cells["GN", "more pictures"]) == "– / 2.0 / –"
        assert "Future, digits Avg." in result.missing
        assert not result.failures

    def test_a_place_that_cannot_be_written_is_told_before_anything_runs(self, recipe: Recipe, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        watching = Watching()
        with pytest.raises(FedkeelError, match=r"cannot be written: .*choose another"):
            reproduce(recipe, directory=tmp_path / "file" / "runs", only=["FedAvg"], observer=watching)
        assert (watching.started, watching.problems) == ([], {})

    def test_a_run_that_fails_is_named_and_the_others_go_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("FEDKEEL_DATA", raising=False)
        broken = parse("small", RECIPE.replace('method = "gn"', 'method = "gn", model = "simple_cnn(norm=false)"'))
        result = reproduce(broken, only=["FedAvg", "GN", "digits"], seeds=1, directory=tmp_path, jobs=1)
        assert list(result.failures or {}) == ["GN, digits scan seed 3"]
        assert "batch norm" in (result.failures or {})["GN, digits scan seed 3"]
        assert result.cells["FedAvg", "digits scan"].mean is not None

    def test_a_domain_that_the_data_lacks_is_told(self, tmp_path: Path) -> None:
        wrong = parse("small", RECIPE.replace('domain = "scan"', 'domain = "scam"'))
        by_hand(wrong, tmp_path, "GN", "digits scan", 3, scan=0.5, paper=0.7)
        result = reproduce(wrong, only=["GN", "digits"], seeds=1, directory=tmp_path, jobs=1)
        assert "no domain 'scam': did you mean 'scan'?" in " ".join(result.skipped)
        assert result.cells["GN", "digits scan"].mean is None
        assert result.cells["GN", "digits paper"].mean == pytest.approx(70.0)
        assert result.cells["GN", "digits Avg."].mean is None

    def test_where_the_data_lie_is_no_part_of_a_run(self, recipe: Recipe, tmp_path: Path) -> None:
        config = recipe.config(recipe.rows[0], recipe.columns[0])
        assert directory_name(config) == directory_name(config.replace(seed=5, device="cuda", executor="serial"))
        assert directory_name(config) != directory_name(config.replace(rounds=3))


class TestMarks:
    def test_changed_options_are_marked_but_not_the_machines(self, recipe: Recipe, tmp_path: Path) -> None:
        by_hand(recipe, tmp_path, "GN", "more bigger", 3, scan=0.5)
        result = reproduce(recipe, only=["GN", "bigger"], seeds=1, directory=tmp_path, workers=1, rounds=2)
        assert result.marks == ["CHANGED: rounds=2, where the paper's setting is another."]
        assert result.cells["GN", "more bigger"].mean == pytest.approx(50.0)

    def test_a_substitute_is_marked(self, tmp_path: Path) -> None:
        text = RECIPE.replace("seeds = [3, 4]", 'seeds = [3, 4]\nsubstitute = "other images."')
        other = parse("small", text)
        by_hand(other, tmp_path, "GN", "more bigger", 3, scan=0.5)
        result = reproduce(other, only=["GN", "bigger"], seeds=1, directory=tmp_path, jobs=1)
        assert result.marks == ["SUBSTITUTE: other images."]


class TestSelection:
    def selected(self, recipe: Recipe, *only: str) -> tuple[list[str], list[str]]:
        rows, columns = select(recipe, only)
        return [row.label for row in rows], [column.name for column in columns]

    def test_rows_and_columns_by_their_labels(self, recipe: Recipe) -> None:
        everything = self.selected(recipe)
        assert self.selected(recipe, "gn") == (["GN"], everything[1])
        assert self.selected(recipe, "digits") == (everything[0], ["digits scan", "digits paper", "digits Avg."])
        assert self.selected(recipe, "GN", "Future", "digits scan") == (["GN", "Future"], ["digits scan"])
        assert self.selected(recipe, "*er", "fed*") == (["FedAvg"], ["digits paper", "more bigger"])

    def test_a_label_that_is_not_there_gets_the_nearest(self, recipe: Recipe) -> None:
        with pytest.raises(FedkeelError, match="did you mean 'FedAvg'"):
            select(recipe, ["FedAvgg"])

    def test_seeds_are_the_recipes_own(self, recipe: Recipe) -> None:
        assert choose_seeds(recipe, None) == [3, 4]
        assert choose_seeds(recipe, 1) == choose_seeds(recipe, "1") == [3]
        assert choose_seeds(recipe, 4) == [3, 4, 0, 1]
        assert choose_seeds(recipe, "7,9") == [7, 9]


class TestReadings:
    def test_statistics_of_the_batch(self, tmp_path: Path) -> None:
        text = RECIPE.replace(
            '{ label = "GN", method = "gn" }', '{ label = "GN", method = "fedavg", statistics = "batch" }'
        )
        text = text.replace("rounds = 2", 'rounds = 2\nevaluate_with = "both"')
        both = parse("small", text)
        result = reproduce(both, only=["FedAvg", "GN", "bigger"], seeds=1, directory=tmp_path, jobs=1)
        (path,) = tmp_path.rglob("summary.json")  # one run, read twice
        run = Run(path.parent)
        found = {record["statistics"]: record["average"] for record in run.records("scores") if record["round"] == 1}
        assert result.cells["FedAvg", "more bigger"].mean == pytest.approx(100 * found["global"])
        assert result.cells["GN", "more bigger"].mean == pytest.approx(100 * found["batch"])
        assert summarise_run(run, [], "batch")["statistics"] == "batch"

    def test_seconds_of_an_epoch_leave_the_first_round_out(self, recipe: Recipe, tmp_path: Path) -> None:
        by_hand(recipe, tmp_path, "GN", "more bigger", 3, scan=0.5)
        (path,) = tmp_path.rglob("summary.json")
        times = [{"round": round, "train": seconds} for round, seconds in enumerate((90.0, 6.0, 12.0))]
        rounds = [{"kind": "round", "round": round, "clients": 3} for round in range(3)]
        (path.parent / "timing.jsonl").write_text("\n".join(map(json.dumps, times)) + "\n")
        (path.parent / "metrics.jsonl").write_text("\n".join(map(json.dumps, rounds)) + "\n")
        assert epoch_seconds(Run(path.parent)) == pytest.approx(3.0)

    def test_relative_numbers_are_divided_by_the_row_they_name(self, tmp_path: Path) -> None:
        text = RECIPE.replace('label = "bigger"', 'label = "bigger", relative_to = "FedAvg"')
        relative = parse("small", text)
        by_hand(relative, tmp_path, "FedAvg", "more bigger", 3, scan=0.5)
        by_hand(relative, tmp_path, "GN", "more bigger", 3, scan=0.8)
        result = reproduce(relative, only=["FedAvg", "GN", "bigger"], seeds=1, directory=tmp_path, jobs=1)
        assert result.cells["FedAvg", "more bigger"].mean == pytest.approx(1.0)
        assert result.cells["GN", "more bigger"].mean == pytest.approx(1.6)
        alone = reproduce(relative, only=["GN", "bigger"], seeds=1, directory=tmp_path, jobs=1)
        assert alone.cells["GN", "more bigger"].mean == pytest.approx(1.6)

    def test_the_unseen_domain(self, tmp_path: Path) -> None:
        text = RECIPE.replace('label = "bigger"', 'label = "bigger", unseen = "paper", read = "unseen"')
        unseen = parse("small", text)
        config = unseen.config(unseen.rows[1], unseen.columns[3])
        finish(
            tmp_path / directory_name(config) / "seed3", config.replace(seed=3), {"scan": 0.9, "paper": 0.4}, ("paper",)
        )
        result = reproduce(unseen, only=["GN", "bigger"], seeds=1, directory=tmp_path, jobs=1)
        assert result.cells["GN", "more bigger"].mean == pytest.approx(40.0)

    @pytest.mark.slow
    def test_a_diagnostic_is_recorded_and_its_number_is_the_cell(self, tmp_path: Path) -> None:
        text = RECIPE.replace('label = "bigger"', 'label = "bigger", unseen = "paper", read = "nmi"')
        diagnosed = parse("small", text.replace('["label-distribution"]', '["loss-gap", "singular-values"]'))
        result = reproduce(diagnosed, only=["FedAvg", "bigger"], seeds=1, directory=tmp_path, jobs=1)
        assert not result.skipped
        (path,) = tmp_path.glob("*/seed3/diagnostics/nmi.json")
        found = json.loads(path.read_text())["rounds"][-1]["numbers"]["NMI by domain"]
        assert result.cells["FedAvg", "more bigger"].mean == found["paper"]
        assert {p.name for p in path.parent.glob("*.json")} == {"nmi.json", "loss-gap.json", "singular-values.json"}
        assert "loss gap at training by domain" in (path.parent / "loss-gap.json").read_text()


class TestCommand:
    @pytest.mark.slow
    def test_the_list_has_every_recipe_with_its_caption(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["reproduce", "--list"]) == 0
        text = capsys.readouterr().out
        for name in names():
            (line,) = [line for line in text.splitlines() if line.split()[:1] == [name]]
            assert line.split(maxsplit=1)[1].strip() == load(name).caption
        assert main(["reproduce", "--list", "--json"]) == 0
        assert [entry["name"] for entry in json.loads(capsys.readouterr().out)] == names()

    @pytest.mark.parametrize(
        ("words", "named"),
        [
            (["hbn/table11"], "did you mean 'hbn/table1'?"),
            (["hbntable6"], "did you mean 'hbn/table6'?"),
            ([], "'fedkeel reproduce' lacks NAME"),
            (["hbn/table1", "--only", "HBNN"], "did you mean 'HBN'?"),
            (["hbn/table1", "--seeds", "x"], "'seeds' is 'x'"),
            (["hbn/table1", "--rounds", "0"], "'rounds' is 0"),
        ],
    )
    def test_a_mistake_is_one_sentence(self, words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["reproduce", *words]) == 2
        told = capsys.readouterr().err.strip()
        assert named in told
        assert len(told.splitlines()) == 1

    def test_a_table_is_run_and_printed(
        self, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("FEDKEEL_DATA", raising=False)
        words = ["reproduce", file, "--only", "FedAvg", "GN", "digits", "--seeds", "1", "--rounds", "1"]
        words += ["--out", str(tmp_path / "runs"), "--jobs", "1", "--quiet"]
        assert main(words) == 0
        text = capsys.readouterr().out
        assert "HBN, Table 0: Two methods on two domains" in text
        assert "*** CHANGED: rounds=1" in text
        assert "/ 10.0 /" in text
        assert "order" in text
        assert main([*words, "--json"]) == 0
        document = json.loads(capsys.readouterr().out)
        assert [cell["row"] for cell in document["cells"]] == ["FedAvg"] * 3 + ["GN"] * 3
        assert main([*words, "--markdown"]) == 0
        assert "| FedAvg | " in capsys.readouterr().out

    def test_a_missing_cell_is_exit_code_1(
        self, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("FEDKEEL_DATA", raising=False)
        assert main(["reproduce", file, "--only", "Future", "scan", "--out", str(tmp_path / "runs"), "--quiet"]) == 1
        captured = capsys.readouterr()
        assert "fedkeel: Skipped: There is no method named 'nosuchmethod'" in captured.err
        assert "– / 50.0 / –" in captured.out


def test_small_is_all_of_a_papers_tables_for_two_cores() -> None:
    from fedkeel.cli.reproduce import recipes_of

    assert recipes_of("greg/small") == [f"greg/table{number}-small" for number in (1, 2, 3, 9)]
    assert recipes_of("hbn/table1") == ["hbn/table1"]
    assert recipes_of("nobody/small") == ["nobody/small"]
