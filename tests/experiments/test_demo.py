"""The demo: it runs end to end, and is described where people read of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedkeel.analysis import requested
from fedkeel.cli import main
from fedkeel.experiments.demo import PARTS, SETTINGS, calibrated
from fedkeel.experiments.difference import RULE
from fedkeel.experiments.rows import read_methods

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
    summary = Path("runs/demo-quick/feature-shift/fedavg/seed0/summary.json")
    made = summary.stat().st_mtime_ns
    assert main(["demo", "--quick"]) == 0
    assert summary.stat().st_mtime_ns == made
    text = capsys.readouterr().out
    assert "The run directories are in runs/demo-quick/" in text
    assert text.endswith("The report, with curves: runs/demo-quick/report.html\n")
    assert first["report"] == "runs/demo-quick/report.html"
    page = Path("runs/demo-quick/report.html").read_text()
    assert "on 2 federations" in page
    assert "divergence between domains" in page


def test_all_five_papers_take_part_and_curves_have_more_than_two_points() -> None:
    tables = [read_methods(part.methods, SETTINGS | part.settings) for part in PARTS]
    shown = [config for table in tables for config in table.values()]
    assert {config.method for config in shown} >= set(PAPERS)
    for config in shown:
        assert sum(map(config.evaluates, range(config.rounds))) > 2
        assert all(diagnostic.needs == "" for diagnostic in requested(config)), "some have no batch norm"


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
