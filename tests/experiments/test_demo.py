"""The demo: it runs end to end, replaces only what is its own, and its sentences say what the numbers say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedkeel import methods as registered
from fedkeel.analysis import requested
from fedkeel.cli import main
from fedkeel.config import Config
from fedkeel.errors import FedkeelError
from fedkeel.experiments.comparison import Comparison
from fedkeel.experiments.demo import BASELINES, MARK, PAPERS, SETTINGS, claim, findings, methods
from fedkeel.experiments.jobs import Trial
from fedkeel.experiments.rows import read_methods
from fedkeel.experiments.tables import Cell, Results, Row
from tests.experiments.made_up import finish


@pytest.mark.slow
def test_quick_runs_end_to_end_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--quick", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert [row["method"] for row in first["rows"]] == ["central", "standalone", "fedavg", "fedbn"]
    assert first["domains"] == ["scan", "paper", "texture", "stroke", "street"]
    summary = Path("runs/demo/fedavg/seed0/summary.json")
    made = summary.stat().st_mtime_ns
    assert main(["demo", "--quick", "--resume"]) == 0
    assert summary.stat().st_mtime_ns == made, "--resume keeps what is finished"
    text = capsys.readouterr().out
    assert "The run directories are in runs/demo/" in text
    assert text.endswith("The report, with curves: runs/demo/report.html\n")
    assert first["report"] == "runs/demo/report.html"
    page = Path("runs/demo/report.html").read_text()
    assert "4 methods on digits-shift" in page
    assert "divergence between domains" in page[page.index('class="keys"') :], "and it says why"


def test_it_takes_whatever_is_registered() -> None:
    names = [re.split("[@(]", text)[0] for text in methods()]
    assert names[: len(BASELINES)] == list(BASELINES)
    assert set(names[len(BASELINES) :]) == {name for name in PAPERS if name in registered.METHODS}
    for config in read_methods(methods(), SETTINGS).values():
        assert [diagnostic.needs for diagnostic in requested(config)] == ["", ""], "some have no batch norm"


def test_of_a_method_with_several_options_the_best_counts_and_is_named_with_them(tmp_path: Path) -> None:
    places = []
    for label, value in (("central", 0.9), ("fedavg@learning_rate=0.1", 0.6), ("fedavg", 0.4), ("gn", 0.5)):
        for seed in range(2):
            finish(tmp_path / label / str(seed), Config(seed=seed), {"scan": value})
            places.append(Trial(label, seed, tmp_path / label / str(seed)))
    sentences = findings(Comparison(tmp_path, places).results)
    assert sentences[0] == "Best on average, by more than the spread: fedavg@learning_rate=0.1 (60.0)."
    assert sentences[1].startswith("The shift costs fedavg@learning_rate=0.1 30.0 points")


class TestClaim:
    def test_an_earlier_demo_is_replaced_and_a_note_in_it_stays(self, tmp_path: Path) -> None:
        place = tmp_path / "demo"
        claim(place, keep=False)
        finish(place / "fedavg" / "seed0", Config(), {"scan": 0.5})
        run = {"method": "fedavg", "seed": 0, "directory": "fedavg/seed0"}
        (place / "comparison.json").write_text(json.dumps({"runs": [run]}))
        (place / "notes.txt").write_text("mine")
        claim(place, keep=True)
        assert (place / "fedavg" / "seed0").exists()
        claim(place, keep=False)
        assert not (place / "fedavg" / "seed0").exists()
        assert (place / "notes.txt").read_text() == "mine"

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


class TestFindings:
    def comparison(self, place: Path, numbers: dict[str, list[tuple[float, float]]]) -> Comparison:
        places = []
        for method, rows in numbers.items():
            for seed, (scan, street) in enumerate(rows):
                directory = place / method / str(seed)
                finish(directory, Config(method=method, seed=seed), {"scan": scan, "street": street})
                places.append(Trial(f"{method}@learning_rate=0.1" if method == "gn" else method, seed, directory))
        return Comparison(place, places)

    def test_they_say_what_the_numbers_say(self, tmp_path: Path) -> None:
        numbers = {"central": (0.9, 0.9), "standalone": (0.7, 0.2), "fedavg": (0.8, 0.3), "gn": (0.9, 0.6)}
        twice = {method: [accuracies, accuracies] for method, accuracies in numbers.items()}
        assert findings(self.comparison(tmp_path, twice).results) == [
            "Best on average, by more than the spread: gn (75.0).",
            "The shift costs fedavg 35.0 points against training on the pooled data (90.0).",
            "Ahead of fedavg by more than the spread: gn (75.0).",
            "Most methods are ahead of the client that trains alone by more than the spread on 'scan', 'street'.",
            "The hardest domain is 'street': 45.0 % over the federated methods.",
        ]

    def test_nothing_is_claimed_within_the_spread(self, tmp_path: Path) -> None:
        """Every method has its best and its worst seed in common with the others, more or less."""
        numbers = {
            "central": [(0.5, 0.6), (0.7, 0.6)],
            "standalone": [(0.4, 0.5), (0.6, 0.5)],
            "fedavg": [(0.5, 0.5), (0.6, 0.6)],
            "gn": [(0.52, 0.52), (0.6, 0.6)],
            "fedbn": [(0.1, 0.1), (0.12, 0.12)],
        }
        assert findings(self.comparison(tmp_path, numbers).results) == [
            "Level within the spread: gn (56.0), fedavg (55.0).",
            "fedavg (55.0) and training on the pooled data (60.0) are level within the spread.",
            "No method here is ahead of fedavg by more than the spread.",
            "On no domain are most methods ahead of the client that trains alone by more than the spread.",
        ]

    def test_one_seed_is_an_anecdote(self, tmp_path: Path) -> None:
        numbers = {"central": [(0.9, 0.9)], "fedavg": [(0.2, 0.3)], "gn": [(0.7, 0.6)]}
        assert findings(self.comparison(tmp_path, numbers).results) == [
            "One seed tells no two methods apart: give several with --seeds."
        ]

    def test_no_loss_is_said_too(self, tmp_path: Path) -> None:
        numbers = {"central": [(0.5, 0.5)] * 2, "standalone": [(0.9, 0.9)] * 2, "fedavg": [(0.6, 0.6)] * 2}
        said = " ".join(findings(self.comparison(tmp_path, numbers).results))
        assert "fedavg (60.0) is ahead of training on the pooled data (50.0)." in said
        assert "On no domain are most methods ahead" in said


def test_the_sentences_below_readmes_table_are_what_the_demo_says_of_it() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    block = next(part for part in readme.split("```text\n") if part.lstrip().startswith("method ")).partition("```")[0]
    headings, _, *lines = [line for line in block.splitlines() if line.strip()]
    domains = headings.split()[1:-3]
    rows = []
    for line in lines[: next(i for i, line in enumerate(lines) if line.startswith("Test accuracy"))]:
        label, *numbers = line.rsplit(maxsplit=2 * len(domains) + 4)
        cells = [
            Cell(float(mean) / 100, float(std.lstrip("±")) / 100)
            for mean, std in zip(numbers[:-2:2], numbers[1:-2:2], strict=True)
        ]
        rows.append(Row(label.strip(), [0, 1, 2], dict(zip(domains, cells, strict=False)), cells[-1]))
    results = Results(rows, domains, frozenset(), ("last",))
    said = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    assert said == findings(results)
