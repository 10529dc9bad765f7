"""The model of a round's time: its parts against what they must be, and the page against what the scripts print."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import forecast
import rounds
from forecast import CARDS, Cluster, Devices, answers, at_server, in_a_tree, on_gpus, waits
from rounds import CNN, Constants, Round, fitted, makespan, measured, seconds

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
KNOWN = Constants(2e-3, 1e-9, 5e-4, 3e-4, 2e-2, 5e-9, 0.1, driver=5e-4, update=1e-9)


def test_equal_clients_are_done_in_turns() -> None:
    assert makespan([2.0] * 7, [1.0, 1.0]) == 8.0
    assert makespan([2.0] * 7, [1.0]) == 14.0
    assert makespan([2.0] * 4, [0.5, 0.5]) == 8.0


def test_nothing_is_done_before_its_work_is() -> None:
    work = [float(1 + place % 5) for place in range(23)] + [30.0]
    for speeds in ([1.0], [1.0, 1.0, 1.0], [2.0, 1.0, 0.5]):
        for width in (1, 4):
            done = makespan(work, speeds, width)
            assert done >= sum(work) / sum(speeds) - 1e-9
            assert done >= 30.0 / max(speeds) - 1e-9


def test_a_slow_actor_does_not_get_what_a_fast_one_ends_sooner() -> None:
    assert makespan([1.0, 1.0], [1.0, 0.1]) == 2.0


def test_one_client_alone_does_not_fill_a_gpu() -> None:
    assert makespan([1.0], [1.0], width=8, alone=0.1) == pytest.approx(10.0)
    assert makespan([1.0] * 8, [1.0], width=8, alone=0.1) == pytest.approx(10.0)


def test_more_actors_than_cores_are_no_faster() -> None:
    for sizes in ((32,) * 40, (8,) * 100):
        two, four = (seconds(Round(CNN, sizes, actors), KNOWN) for actors in (2, 4))
        assert two <= four
        assert four < seconds(Round(CNN, sizes, 1), KNOWN)


def test_the_fit_finds_the_constants_that_made_the_rounds() -> None:
    def cpu(round: Round) -> float:
        return 1e-3 + len(round.sizes) * KNOWN.of_driver(round)

    made = [(round, seconds(round, KNOWN), cpu(round)) for round in rounds.to_fit()]
    found = fitted(made)
    assert found.driver == pytest.approx(KNOWN.driver)
    assert found.update == pytest.approx(KNOWN.update, rel=1e-3)
    for round in rounds.to_check():
        assert seconds(round, found) == pytest.approx(seconds(round, KNOWN), rel=0.03)


def test_four_actors_are_predicted_and_not_fitted() -> None:
    assert {round.actors for round in rounds.to_fit()} == {1, 2}
    assert {round.actors for round in rounds.to_check()} == {1, 2, 4}
    assert [round for round, *_ in measured("fit")] == rounds.to_fit()
    assert [round for round, *_ in measured("check")] == rounds.to_check()


def test_a_machine_alone_sends_nothing_over_the_link() -> None:
    card = CARDS[1]
    alone, eight = on_gpus(card, Cluster(8), KNOWN), on_gpus(card, Cluster(64), KNOWN)
    assert alone["down"] == alone["up"] == in_a_tree(card, Cluster(8), KNOWN) == 0
    assert eight["up"] == 2 * eight["down"]  # sums of 64 bits
    assert eight["compute"] < alone["compute"]
    assert alone["compute"] >= alone["evenly"]
    assert in_a_tree(card, Cluster(64), KNOWN) < eight["up"] + eight["merge"]


def test_alike_devices_answer_at_the_same_time() -> None:
    alike = Devices(images_spread=0, speed_spread=0, link_spread=0, silent=0)
    image, model = 1e-3, 10**6
    expected = 100 * image / 0.5 + model * 8 / 20e6 + model * 8 / 5e6
    found = answers(alike, image, model, asked=10, seed=0)
    assert found == pytest.approx([expected] * 10)
    waited = waits(alike, image, model, draws=3)
    assert waited["all"] == waited["half"] == waited["first of 1.3"] == pytest.approx(expected)


def test_who_asks_more_waits_less_for_the_last() -> None:
    waited = waits(Devices(), 1e-3, 10**6, draws=5)
    assert waited["half"] < waited["first of 1.3"] < waited["all"]


def test_a_server_without_a_tree_holds_every_update() -> None:
    many, few = (at_server(Devices(clients=count), 10**6, KNOWN) for count in (1000, 100))
    assert many["held"] == 10 * few["held"] == 4e9
    assert many["tree"] == few["tree"]


def test_the_page_says_what_the_scripts_print(capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text()
    constants = Constants(**json.loads(rounds.FITTED.read_text()))
    shown = [[one for one in measured(use) if one[0].sums] for use in ("fit", "check")]
    lines = [line for taken in shown for line in rounds.table(taken, constants)]
    forecast.tell_gpus(constants)
    forecast.tell_devices(constants)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert [line for line in lines + printed if line not in page] == []


def test_the_constants_that_are_kept_are_those_of_the_measured_rounds() -> None:
    kept, found = Constants(**json.loads(rounds.FITTED.read_text())), fitted(measured("fit"))
    for round in rounds.to_check():
        assert seconds(round, kept) == pytest.approx(seconds(round, found), rel=0.02)
    assert replace(kept, client=0.0) != kept
