"""The page of results says what the ledger says, and nothing else."""

import json
from pathlib import Path

import pytest

from fedkeel.cli import main
from fedkeel.experiments.ledger import Ledger
from fedkeel.experiments.recipes import load
from fedkeel.experiments.results_page import all_blocks, page, verdicts
from tests.experiments.lines import RECIPE, line, small
from tests.test_book import script

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
    assert "`fedkeel reproduce small --ledger`" in text
    assert "3 seeds" in text
    assert "## Stale" not in text
    assert "## Quick looks" not in text


def test_another_number_of_seeds_is_told_in_its_cell(ledger: Ledger) -> None:
    ledger.add([line("GN", "digits scan", 7, 31.0)])
    assert "31.0±0.8 / 30.0 / +1.0 (4)" in page(ledger, [small()])


def test_quick_looks_changes_and_stale_lines_are_apart(ledger: Ledger) -> None:
    ledger.add([line("GN", "digits scan", 0, 12.0, rounds=1)])
    ledger.add([line("GN", "digits scan", 0, 13.0, changes={"precision": "bf16"})])
    ledger.add([line("GN", "digits paper", 9, 14.0, version="of before")])
    text = page(ledger, [small()])
    whole, _, rest = text.partition("## Quick looks")
    quick, _, stale = rest.partition("## Stale")
    assert "12.0 / 30.0" in quick
    assert "--scale 0.5" in quick
    assert "**Changed**: precision=bf16." in whole
    assert "13.0 / 30.0" in whole
    assert "31.0±1.0 / 30.0" in whole
    assert "| small | GN | 1 | the recipe has changed |" in stale
    assert "14.0" not in text


def test_without_its_recipe_a_line_is_stale(ledger: Ledger) -> None:
    blocks, stale = all_blocks(ledger)
    assert blocks == []
    assert set(stale.values()) == {"there is no such recipe any more"}


def test_the_advice_rests_on_differences_from_fedavg(ledger: Ledger) -> None:
    choose = script("choose")
    (found,) = choose.evidence(all_blocks(ledger, [small()])[0])
    assert (found.shift, found.row, found.method) == (choose.FEATURE, "GN", "gn")
    assert (found.text, found.verdict) == ("+10.0 ±0.0 (3 seeds)", "ahead")
    ledger.add([line("GN", "digits scan", 0, 12.0, changes={"precision": "bf16"})])
    assert len(list(choose.evidence(all_blocks(ledger, [small()])[0]))) == 1


def test_seconds_and_gaps_are_no_points_of_an_advice(tmp_path: Path) -> None:
    recipe, ledger = load("greg/figure2"), Ledger(tmp_path)
    for seed in range(3):
        for row, accuracy, gap in (("FedAvg", 80.0, 0.5), ("FedAvg+GReg", 84.0, -0.1)):
            ledger.add([line(row, "PACS", seed, accuracy, recipe), line(row, "gap", seed, gap, recipe)])
    (found,) = script("choose").evidence(all_blocks(ledger)[0])
    assert (found.data, found.mean) == ("PACS", 4.0)


def test_what_a_reader_must_know_of_the_data(ledger: Ledger) -> None:
    (ledger.folder / "remarks.toml").write_text('[data]\ndigits-shift = "They are small."\n')
    assert "- They are small." in page(ledger, [small()])


def test_a_verdict_comes_from_the_ledger(tmp_path: Path) -> None:
    recipe, ledger = load("hbn/table6"), Ledger(tmp_path)
    for seed in range(3):
        ledger.add([line("FedAvg+HBN", "Acc", seed, 70.0 + seed, recipe)])
        ledger.add([line("(2) Eq. 8: weighted average", "Acc", seed, 60.0 + seed + 0.1 * seed, recipe)])
    found = {claim.says: verdict for claim, verdict in verdicts(all_blocks(ledger)[0])}
    told = {says: verdict.text for says, verdict in found.items() if verdict is not None and verdict.text == "holds"}
    assert list(told) == [POOLING]
    assert "| +0.3 | +9.9 ±0.2 | 3 | **holds** |" in page(ledger)


def test_a_moving_average_that_is_still_the_start_says_nothing_of_eq_7(tmp_path: Path) -> None:
    recipe, ledger = load("hbn/table6"), Ledger(tmp_path)
    for seed in range(3):
        ledger.add([line("FedAvg+HBN", "Acc", seed, 70.0 + seed, recipe)])
        ledger.add([line("(1) Eq. 7: moving average", "Acc", seed, 60.0 + seed + 0.1 * seed, recipe)])
        ledger.add([line("(1) with momentum 0.01", "Acc", seed, 60.0 + seed + 0.1 * seed, recipe)])
    judged = verdicts(all_blocks(ledger)[0])
    (verdict,) = (one for claim, one in judged if "(Eq. 7)" in claim.says and claim.recipe == recipe.name)
    assert verdict is None  # the row with 0.1 was not run


def test_who_is_ahead_in_all_rounds_is_another_rule(tmp_path: Path) -> None:
    recipe, ledger = load("hbn/figure6"), Ledger(tmp_path)
    for seed in range(3):
        for row, last in (("+HBN", 40.0), ("+BN", 50.0), ("+GN", 50.0)):  # who is behind at the end was ahead before
            results = {"mean-last-10": last, "every-round": 70 - last + 0.1 * seed * last}
            ledger.add([line(row, "VGG-11", seed, last, recipe, rule="mean-last-10", results=results)])
    (verdict,) = (verdict for claim, verdict in verdicts(all_blocks(ledger)[0]) if claim.recipe == "hbn/figure6")
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


def test_lines_with_changes_do_not_replace_those_without(tmp_path: Path) -> None:
    recipe, ledger = load("hbn/table6"), Ledger(tmp_path)
    rows = {"FedAvg+HBN": 70.0, "(2) Eq. 8: weighted average": 60.0}
    for seed in range(3):
        for row, value in rows.items():
            ledger.add([line(row, "Acc", seed, value + seed + 0.01 * value * seed, recipe)])
            ledger.add([line(row, "Acc", seed, 100 - value, recipe, changes={"precision": "bf16"})])
            ledger.add([line(row, "Acc", seed, 90 - value, recipe, rounds=1000)])
    told = {claim.says: verdict.text for claim, verdict in verdicts(all_blocks(ledger)[0]) if verdict is not None}
    assert told[POOLING] == "holds"
    text = page(ledger)
    assert "--rounds 1000 --ledger" in text.partition("## Quick looks")[2]


class TestCommand:
    def test_writing_and_checking(self, ledger: Ledger, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        recipe, out = tmp_path / "small.toml", tmp_path / "page.md"
        recipe.write_text(RECIPE)
        words = ["results", str(recipe), "--ledger", str(ledger.folder)]
        assert main([*words, "--out", str(out)]) == 0
        assert out.read_text() == page(ledger, [small()])
        assert main([*words, "--check", str(out)]) == 0
        out.write_text(out.read_text().replace("31.0±1.0", "32.0±1.0"))
        assert main([*words, "--check", str(out)]) == 2
        assert "is not what the ledger says" in capsys.readouterr().err
        assert main([*words, "--check", str(tmp_path / "none.md")]) == 2
        assert "cannot be read" in capsys.readouterr().err
        assert main([*words, "--json"]) == 0
        assert {"claims", "stale"} == json.loads(capsys.readouterr().out).keys()

    def test_no_ledger(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["results", "--ledger", str(tmp_path / "none")]) == 2
        assert "'fedkeel reproduce NAME --ledger' makes one" in capsys.readouterr().err


@pytest.mark.slow  # the methods of all its lines are tried out, for both
def test_the_projects_pages_are_what_its_ledger_says() -> None:
    assert (ROOT / "docs" / "results.md").read_text(encoding="utf-8") == page(Ledger(ROOT / "results"))
    for path, text in script("choose").pages().items():
        assert path.read_text(encoding="utf-8") == text, "run .ci/choose"
