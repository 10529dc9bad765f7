"""What a table shows, in sentences: what the numbers say, and nothing that they do not bear out."""

from __future__ import annotations

from pathlib import Path

from fedkeel.config import Config
from fedkeel.experiments.comparison import Comparison
from fedkeel.experiments.findings import findings, margin
from fedkeel.experiments.jobs import Trial
from fedkeel.experiments.tables import Cell, Results, Row
from tests.experiments.made_up import finish


def test_of_a_method_with_several_options_the_best_counts_and_is_named_with_them(tmp_path: Path) -> None:
    places = []
    for label, value in (("central", 0.9), ("fedavg@learning_rate=0.1", 0.6), ("fedavg", 0.4), ("gn", 0.5)):
        for seed in range(2):
            finish(tmp_path / label / str(seed), Config(seed=seed), {"scan": value})
            places.append(Trial(label, seed, tmp_path / label / str(seed)))
    sentences = findings(Comparison(tmp_path, places).results)
    assert sentences[0].startswith("The shift costs fedavg@learning_rate=0.1 30.0 points")
    assert "Best on average, by more than the spread: fedavg@learning_rate=0.1 (60.0)." in sentences


def table(**accuracies: tuple[float, float]) -> Results:
    """Of 'scan', and of 'street', which is unseen; both with the same spread."""
    rows = []
    for method, (scan, street) in accuracies.items():
        cells = {"scan": Cell(scan, 0.01), "street": Cell(street, 0.01)}
        rows.append(Row(method, [0, 1, 2], cells, cells["scan"]))
    return Results(rows, ["scan", "street"], frozenset({"street"}), ("last",))


def test_of_an_unseen_domain_the_same_is_asked_by_itself() -> None:
    said = findings(table(fedavg=(0.6, 0.4), greg=(0.8, 0.6), fedwon=(0.8, 0.75)))
    assert said == [
        "Ahead of fedavg by more than the spread: greg (80.0), fedwon (80.0).",
        "On 'street', which no client has: ahead of fedavg by more than the spread: greg (60.0), fedwon (75.0).",
        "On 'street', which no client has: best, by more than the spread: fedwon (75.0).",
    ]


def test_what_other_test_images_could_change_is_not_claimed() -> None:
    results = table(fedavg=(0.80, 0.40), greg=(0.84, 0.90))
    assert "Ahead of fedavg by more than the spread: greg (84.0)." in findings(results, {"scan": 10_000, "street": 90})
    said = findings(results, {"scan": 90, "street": 90})
    assert "No method here is ahead of fedavg by more than the spread." in said
    assert "On 'street', which no client has: ahead of fedavg by more than the spread: greg (90.0)." in said


def test_the_margin_is_that_of_a_difference_of_two_shares() -> None:
    """1.96 sqrt(2 p (1 - p) / n), in %; and as if all images were one set, where domains have equally many."""
    cell = Cell(50.0, 1.0)
    assert abs(margin(cell, cell, [200]) - 9.8) < 1e-9
    assert abs(margin(cell, cell, [100, 100]) - 9.8) < 1e-9
    assert margin(cell, cell, [100, 0]) == 0, "not known"


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
            "The shift costs fedavg 35.0 points against training on the pooled data (90.0).",
            "Ahead of fedavg by more than the spread: gn (75.0).",
            "Best on average, by more than the spread: gn (75.0).",
            "Most methods are ahead of the client that trains alone by more than the spread on 'scan' (70.0 alone), "
            "'street' (20.0 alone).",
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
            "fedavg (55.0) and training on the pooled data (60.0) are level within the spread.",
            "No method here is ahead of fedavg by more than the spread.",
            "Last on average, by more than the spread: fedbn (11.0).",
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
