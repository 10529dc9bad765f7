"""The demo: it runs end to end, replaces only what is its own, and is described where people read of it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedkeel.analysis import requested
from fedkeel.cli import main
from fedkeel.config import Config
from fedkeel.errors import FedkeelError
from fedkeel.experiments.demo import MARK, PARTS, SETTINGS, calibrated, claim
from fedkeel.experiments.difference import RULE
from fedkeel.experiments.rows import read_methods
from tests.experiments.made_up import finish

README = Path(__file__).parents[2] / "README.md"
PAPERS = ("greg", "hbn", "fedwon", "fedcoda", "univarfl")


@pytest.mark.slow
def test_quick_runs_end_to_end_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--quick", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    looks, labels = first["parts"]["feature-shift"], first["parts"]["label-shift"]
    assert [row["method"] for row in looks["rows"]] == ["central", "fedavg", "fedbn"]
    assert looks["domains"] == ["scan", "paper", "texture", "stroke", "street"]
    assert looks["unseen_domains"] == ["street"]
    assert [row["method"] for row in labels["rows"]] == ["standalone", "fedavg"]
    summary = Path("runs/demo/feature-shift/fedavg/seed0/summary.json")
    made = summary.stat().st_mtime_ns
    assert main(["demo", "--quick", "--resume"]) == 0
    assert summary.stat().st_mtime_ns == made, "--resume keeps what is finished"
    text = capsys.readouterr().out
    assert "The run directories are in runs/demo/" in text
    assert text.endswith("The report, with curves: runs/demo/report.html\n")
    assert first["report"] == "runs/demo/report.html"
    page = Path("runs/demo/report.html").read_text()
    assert "on 2 federations" in page
    assert "divergence between domains" in page


def test_all_five_papers_take_part_and_curves_have_more_than_two_points() -> None:
    tables = [read_methods(part.methods, SETTINGS | part.settings) for part in PARTS]
    shown = [config for table in tables for config in table.values()]
    assert {config.method for config in shown} >= set(PAPERS)
    for config in shown:
        assert sum(map(config.evaluates, range(config.rounds))) > 2
        assert all(diagnostic.needs == "" for diagnostic in requested(config)), "some have no batch norm"


class TestClaim:
    def test_an_earlier_demo_is_replaced_and_a_note_in_it_stays(self, tmp_path: Path) -> None:
        place = tmp_path / "demo"
        claim(place, keep=False)
        runs = [place / "fedavg" / "seed0", place / "label-shift" / "fedavg" / "seed0"]  # an old demo's, and one now
        for directory in runs:
            finish(directory, Config(), {"scan": 0.5})
            run = {"method": "fedavg", "seed": 0, "directory": "fedavg/seed0"}
            (directory.parents[1] / "comparison.json").write_text(json.dumps({"runs": [run]}))
        (place / "notes.txt").write_text("mine")
        own = place / "own" / "fedavg" / "seed0"  # of a comparison that somebody made below
        finish(own, Config(), {"scan": 0.5})
        shutil.copy(place / "comparison.json", place / "own")
        claim(place, keep=True)
        assert all(directory.exists() for directory in runs)
        claim(place, keep=False)
        assert not any(directory.exists() for directory in runs)
        assert (place / "notes.txt").read_text() == "mine"
        assert (own / "summary.json").exists()
        assert (place / "own" / "comparison.json").exists()

    def test_a_directory_of_someone_else_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("years of work")
        with pytest.raises(FedkeelError, match="not made by the demo"):
            claim(tmp_path, keep=False)
        assert not (tmp_path / MARK).exists()

    def test_an_index_cannot_point_outside(self, tmp_path: Path) -> None:
        place, outside = tmp_path / "demo", tmp_path / "outside"
        claim(place, keep=False)
        finish(outside, Config(), {"scan": 0.5})
        run = {"method": "fedavg", "seed": 0, "directory": "../outside"}
        (place / "comparison.json").write_text(json.dumps({"runs": [run]}))
        claim(place, keep=False)
        assert (outside / "summary.json").exists()


def test_the_sentences_below_the_pages_tables_have_the_tables_numbers_and_the_rule() -> None:
    blocks = "```".join(page.read_text() for page in (README, README.parent / "docs" / "cli.md")).split("```")
    tables = [block.removeprefix("text\n") for block in blocks if block.startswith(("text\nFeature", "text\nLabel"))]
    assert [table.splitlines()[0] for table in tables] == [part.title for part in PARTS]
    for table in tables:
        _, headings, _, *lines = table.splitlines()
        columns = headings.replace(" (unseen)", "").split()[1:]
        means = {line.split()[0]: re.findall(r"(\d+\.\d) ±", line) for line in lines if "±" in line}
        said = [line for line in lines if line.startswith("- ")]
        assert any(RULE in line for line in said)
        for line in said:
            place = columns.index("street" if line.startswith("- On 'street'") else "average")
            for method, number in re.findall(
                r"(\w+) \((\d+\.\d)\)", line.replace("training on the pooled data", "central")
            ):
                assert means[method][place] == number, line
        assert len(re.findall(r"\w+ \(\d+\.\d\)", " ".join(said))) >= 4


def test_what_calibration_changed_is_told_of_methods_that_it_changed(tmp_path: Path) -> None:
    def trial(label: str, seed: int, before: float, after: float) -> Any:
        place = tmp_path / label / f"{seed}" / "diagnostics"
        place.mkdir(parents=True)
        rounds = [{"round": 0, "numbers": {"accuracy": {"as it is": before, "rule 64": after}}}]
        (place / "calibration.json").write_text(json.dumps({"rounds": rounds}))
        return SimpleNamespace(label=label, directory=place.parent)

    trials = [
        trial("fedavg@learning_rate=0.05", 0, 60.0, 80.0),
        trial("fedavg@learning_rate=0.05", 1, 64.0, 64.0),  # counts, though nothing changed
        trial("central", 0, 80.0, 81.0),  # is no site's
        trial("fedcoda", 0, 70.0, 70.0),
        SimpleNamespace(label="fedwon", directory=tmp_path / "none"),
    ]
    (sentence,) = calibrated(SimpleNamespace(trials=trials))  # type: ignore[arg-type]
    assert sentence.endswith("without labels: fedavg 62.0 to 72.0.")
    assert calibrated(SimpleNamespace(trials=trials[2:])) == []  # type: ignore[arg-type]
