"""What a table shows, in sentences: what the numbers say, and nothing that they do not bear out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedkeel.config import Config
from fedkeel.experiments.comparison import Comparison
from fedkeel.experiments.difference import Cell
from fedkeel.experiments.findings import findings
from fedkeel.experiments.jobs import Trial
from fedkeel.experiments.tables import Results, Row
from tests.experiments.made_up import finish

RULE = "Ahead: paired over seeds, 95 % interval above zero."


def table(**accuracies: tuple[float, float]) -> Results:
    """Of 'scan', and of 'street', which is unseen; the seeds differ, and make no difference between the methods."""
    rows = []
    for method, both in accuracies.items():
        scan, street = (Cell({seed: value + 0.05 * (seed - 1) for seed in range(3)}) for value in both)
        rows.append(Row(method, [0, 1, 2], {"scan": scan, "street": street}, scan))
    return Results(rows, ["scan", "street"], frozenset({"street"}), ("last",))


def test_of_an_unseen_domain_the_same_is_asked_by_itself() -> None:
    said = findings(table(fedavg=(0.6, 0.4), greg=(0.8, 0.6), fedwon=(0.8, 0.75)))
    assert said == [
        "Ahead of fedavg: greg (80.0), fedwon (80.0).",
        "On 'street', which no client has: ahead of fedavg: greg (60.0), fedwon (75.0).",
        "On 'street', which no client has: ahead of every other federated method: fedwon (75.0).",
        RULE,
    ]


def test_what_other_test_images_could_change_is_not_claimed() -> None:
    results = table(fedavg=(0.80, 0.40), greg=(0.84, 0.90))
    assert "Ahead of fedavg: greg (84.0)." in findings(replace(results, images={"scan": 10_000, "street": 90}))
    said = findings(replace(results, images={"scan": 90, "street": 90}))
    assert said == [
        "Undecided against fedavg: greg (84.0).",
        "On 'street', which no client has: ahead of fedavg: greg (90.0).",
        "Ahead: paired over seeds, 95 % interval above zero and more than other test images could change.",
    ]


def test_the_sentences_and_the_stars_never_contradict_each_other() -> None:
    """Ranges that do not touch and are undecided by three seeds, and one clear lead with ranges that do."""
    rows = [
        Row("fedavg", [0, 1, 2], {}, Cell({0: 0.52, 1: 0.59, 2: 0.565})),
        Row("greg", [0, 1, 2], {}, Cell({0: 0.62, 1: 0.605, 2: 0.609})),
        Row("gn", [0, 1, 2], {}, Cell({0: 0.53, 1: 0.60, 2: 0.575})),
        Row("ln", [0], {}, Cell({0: 0.99})),
    ]
    results = Results(rows, [], frozenset(), ("last",))
    assert findings(results)[:-1] == [
        "Ahead of fedavg: gn (56.8).",
        "Undecided against fedavg: greg (61.1).",
        "Too few seeds against fedavg: ln (99.0).",
    ]
    assert [row.method for row in rows if results.marked(row)[-1][1]] == ["greg", "gn"], "none is ahead of these"
    rule = "*: no other is ahead of it, paired over seeds, 95 % interval above zero; none where nothing is decided."
    assert results.text().endswith(rule)


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
        thrice = {method: [accuracies] * 3 for method, accuracies in numbers.items()}
        assert findings(self.comparison(tmp_path, thrice).results) == [
            "The shift costs fedavg 35.0 points against training on the pooled data (90.0).",
            "Ahead of fedavg: gn (75.0).",
            RULE,
        ]

    def test_what_seeds_do_not_decide_is_told_as_undecided(self, tmp_path: Path) -> None:
        numbers = {
            "central": [(0.5, 0.6), (0.7, 0.6), (0.6, 0.5)],
            "standalone": [(0.4, 0.5), (0.6, 0.5), (0.6, 0.6)],
            "fedavg": [(0.5, 0.5), (0.6, 0.6), (0.5, 0.6)],
            "gn": [(0.52, 0.52), (0.6, 0.6), (0.5, 0.6)],
            "fedbn": [(0.1, 0.1), (0.12, 0.12), (0.1, 0.12)],
        }
        assert findings(self.comparison(tmp_path, numbers).results) == [
            "fedavg (55.0) against training on the pooled data (58.3): undecided.",
            "Behind fedavg: fedbn (11.0).",
            "Undecided against fedavg: gn (55.7).",
            RULE,
        ]

    def test_one_or_two_seeds_decide_nothing(self, tmp_path: Path) -> None:
        numbers = {"central": [(0.9, 0.9)], "fedavg": [(0.2, 0.3)] * 2, "gn": [(0.7, 0.6)] * 2}
        assert findings(self.comparison(tmp_path, numbers).results) == [
            "Fewer than 3 seeds in common decide nothing: give 3 or more with --seeds."
        ]
