"""The demo: it runs end to end, replaces only what is its own, and its sentences say what the numbers say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fedkeel import methods as registered
from fedkeel.analysis import chosen
from fedkeel.cli import main
from fedkeel.comparison import Comparison, Place
from fedkeel.config import Config
from fedkeel.demo import BASELINES, MARK, PAPERS, SETTINGS, claim, findings, methods
from fedkeel.entries import read_entries
from fedkeel.errors import FedkeelError
from tests.test_comparison import finish


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
    for config in read_entries(methods(), SETTINGS).values():
        assert [diagnostic.needs_batch_norm for diagnostic in chosen(config)] == [False, False], (
            "some have no batch norm"
        )


def test_of_a_method_with_several_options_the_best_counts_and_is_named_with_them(tmp_path: Path) -> None:
    places = []
    for label, value in (("central", 0.9), ("fedavg@learning_rate=0.1", 0.6), ("fedavg", 0.4), ("gn", 0.5)):
        finish(tmp_path / label, Config(), {"scan": value})
        places.append(Place(label, 0, tmp_path / label))
    sentences = findings(Comparison(tmp_path, places))
    assert sentences[0].startswith("Best on average: fedavg@learning_rate=0.1 with 60.0 %")
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
                places.append(Place(f"{method}@learning_rate=0.1" if method == "gn" else method, seed, directory))
        return Comparison(place, places)

    def test_they_say_what_the_numbers_say(self, tmp_path: Path) -> None:
        numbers = {"central": [(0.9, 0.9)], "standalone": [(0.7, 0.2)], "fedavg": [(0.8, 0.3)], "gn": [(0.7, 0.6)]}
        assert findings(self.comparison(tmp_path, numbers)) == [
            "Best on average: gn with 65.0 %.",
            "The shift costs fedavg 35.0 points against training on the pooled data; gn wins 29 % of them back.",
            "Federation helps most on 'street': gn reaches 60.0 %, the client alone 20.0 %.",
            "The hardest domain is 'street' (45.0 % over the federated methods); best there is gn with 60.0 %.",
        ]

    def test_what_three_seeds_do_not_tell_apart_is_not_called_better(self, tmp_path: Path) -> None:
        numbers = {
            "fedavg": [(0.5, 0.5), (0.6, 0.6)],
            "gn": [(0.52, 0.52), (0.6, 0.6)],
            "fedbn": [(0.1, 0.1), (0.1, 0.1)],
        }
        best = findings(self.comparison(tmp_path, numbers))[0]
        assert best == "Best on average: gn with 56.0 %; within the spread of it: fedavg (55.0)."

    def test_no_gain_is_said_too(self, tmp_path: Path) -> None:
        numbers = {"central": [(0.5, 0.5)], "standalone": [(0.9, 0.9)], "fedavg": [(0.6, 0.6)]}
        said = " ".join(findings(self.comparison(tmp_path, numbers)))
        assert "fedavg is not behind" in said
        assert "On no domain does a federation beat" in said
