"""The page of results says what the ledger says, and nothing else."""

from pathlib import Path

import pytest

from fedkeel.experiments.recipes import load
from tests.test_book import script
from tests.tools.lines import line, small

from ledger import Ledger  # isort: skip
from results import page, tables_of, verdicts  # isort: skip

ROOT = Path(__file__).parents[2]
POOLING = "The unbiased pooling of variances is better than their weighted mean (Eq. 8)."


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    made = Ledger(tmp_path)
    for seed in range(3):
        for column, step in (("digits scan", 0.0), ("digits paper", 4.0)):
            made.add([line("FedAvg", column, seed, 20.0 + seed + step), line("GN", column, seed, 30.0 + seed + step)])
    return made


def test_means_deviations_and_differences(ledger: Ledger) -> None:
    text = page(ledger, [small()])
    assert "| FedAvg | 21.0±1.0 / 10.0 / +11.0 | 25.0±1.0 / 20.0 / +5.0 | 23.0±1.0 / 15.0 / +8.0 |" in text
    assert "| GN | 31.0±1.0 / 30.0 / +1.0 | 35.0±1.0 / 40.0 / -5.0 | 33.0±1.0 / 35.0 / -2.0 |" in text
    assert "`fedkeel reproduce small`" in text
    assert "3 seeds" in text
    assert "## Stale" not in text


def test_another_number_of_seeds_is_told_in_its_cell(ledger: Ledger) -> None:
    ledger.add([line("GN", "digits scan", 7, 31.0)])
    assert "31.0±0.8 / 30.0 / +1.0 (4)" in page(ledger, [small()])


def test_stale_lines_are_apart(ledger: Ledger) -> None:
    ledger.add([line("GN", "digits paper", 9, 14.0, version="of before"), line("FedAvg", "digits scan", 9, 13.0, of=9)])
    whole, _, stale = page(ledger, [small()]).partition("## Stale")
    assert "31.0±1.0 / 30.0" in whole
    assert "| small | GN | 1 | the recipe has changed |" in stale
    assert "| small | FedAvg | 1 | it has another number of rounds than the recipe |" in stale


def test_without_its_recipe_a_line_is_stale(ledger: Ledger) -> None:
    tables, stale = tables_of(ledger)
    assert tables == []
    assert set(stale.values()) == {"there is no such recipe any more"}


def test_what_was_measured_are_differences_from_fedavg(ledger: Ledger) -> None:
    choose = script("choose")
    (found,) = choose.evidence(tables_of(ledger, [small()])[0])
    assert (found.shift, found.row, found.method) == (choose.FEATURE, "GN", "gn")
    assert (found.text, found.ours.verdict) == ("+10.0 ±0.0 (3 seeds)", "ahead")


def test_seconds_and_gaps_are_no_points(tmp_path: Path) -> None:
    recipe, ledger = load("greg/figure2"), Ledger(tmp_path)
    for seed in range(3):
        for row, accuracy, gap in (("FedAvg", 80.0, 0.5), ("FedAvg+GReg", 84.0, -0.1)):
            ledger.add([line(row, "PACS", seed, accuracy, recipe), line(row, "gap", seed, gap, recipe)])
    (found,) = script("choose").evidence(tables_of(ledger)[0])
    assert (found.data, found.ours.mean) == ("PACS", 4.0)


def test_a_verdict_comes_from_the_ledger(tmp_path: Path) -> None:
    recipe, ledger = load("hbn/table6"), Ledger(tmp_path)
    for seed in range(3):
        ledger.add([line("FedAvg+HBN", "Acc", seed, 70.0 + seed, recipe)])
        ledger.add([line("(2) Eq. 8: weighted average", "Acc", seed, 60.0 + seed + 0.1 * seed, recipe)])
    found = {claim.says: verdict for claim, verdict in verdicts(tables_of(ledger)[0])}
    told = {says: verdict.text for says, verdict in found.items() if verdict is not None and verdict.text == "holds"}
    assert list(told) == [POOLING]
    assert "| +0.3 | +9.9 ±0.2 | 3 | **holds** |" in page(ledger)


def test_a_moving_average_that_is_still_the_start_says_nothing_of_eq_7(tmp_path: Path) -> None:
    recipe, ledger = load("hbn/table6"), Ledger(tmp_path)
    for seed in range(3):
        ledger.add([line("FedAvg+HBN", "Acc", seed, 70.0 + seed, recipe)])
        ledger.add([line("(1) Eq. 7: moving average", "Acc", seed, 60.0 + seed + 0.1 * seed, recipe)])
        ledger.add([line("(1) with momentum 0.01", "Acc", seed, 60.0 + seed + 0.1 * seed, recipe)])
    judged = verdicts(tables_of(ledger)[0])
    (verdict,) = (one for claim, one in judged if "(Eq. 7)" in claim.says and claim.recipe == recipe.name)
    assert verdict is None  # the row with 0.1 was not run


def test_who_is_ahead_in_all_rounds_is_another_rule(tmp_path: Path) -> None:
    recipe, ledger = load("hbn/figure6"), Ledger(tmp_path)
    for seed in range(3):
        for row, last in (("+HBN", 40.0), ("+BN", 50.0), ("+GN", 50.0)):  # who is behind at the end was ahead before
            results = {"mean-last-10": last, "every-round": 70 - last + 0.1 * seed * last}
            ledger.add([line(row, "VGG-11", seed, last, recipe, rule="mean-last-10", results=results)])
    (verdict,) = (verdict for claim, verdict in verdicts(tables_of(ledger)[0]) if claim.recipe == "hbn/figure6")
    assert verdict is not None
    assert verdict.decisive.ours.by_seed == pytest.approx({0: 10.0, 1: 9.0, 2: 8.0})


def test_what_is_no_accuracy_has_three_digits(tmp_path: Path) -> None:
    recipe, ledger = load("fedcoda/table7"), Ledger(tmp_path)
    for seed in range(3):
        for row, value in (("FedCoda", 0.98 + 0.001 * seed), ("FedCoda w/o BNC", 0.95)):
            ledger.add([line(row, "PACS P", seed, value, recipe)])
    assert "| +0.053 | +0.031 ±0.002 | 3 | **holds** |" in page(ledger)


def test_every_claim_is_on_one_line_at_both_sizes(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for name, step in (("hbn/table1", 2.0), ("hbn/table1-small", -3.0)):
        recipe = load(name)
        for seed in range(20, 23):
            ledger.add([line("HBN", "CIFAR-10 phi=0.6", seed, 70.0 + step + 0.1 * seed, recipe)])
            ledger.add([line("BN", "CIFAR-10 phi=0.6", seed, 70.0, recipe)])
    half_way = page(ledger).partition("## What the papers claim")[0]
    assert "| **holds** +4.1 ±0.2 (hbn/table1) | not run |" in half_way
    for seed in (23, 24):
        ledger.add([line("HBN", "CIFAR-10 phi=0.6", seed, 67.0 + 0.1 * seed, recipe)])
        ledger.add([line("BN", "CIFAR-10 phi=0.6", seed, 70.0, recipe)])
    told = page(ledger).partition("## What the papers claim")[0]
    assert (
        "| HBN | HBN is ahead of batch norm under label shift. | +2.8 | **holds** +4.1 ±0.2 (hbn/table1) | "
        "**does not hold** -0.8 ±0.2 (hbn/table1-small) |"
    ) in told
    assert "| HBN | With batches of two images HBN is ahead of batch norm. | +5.0 | – | not run |" in told


@pytest.mark.slow
def test_the_projects_pages_are_what_its_ledger_says() -> None:
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == page(Ledger())
    for path, text in script("choose").pages().items():
        assert path.read_text(encoding="utf-8") == text, "run .ci/choose"
