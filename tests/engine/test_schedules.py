"""The learning rate of every round, by schedules with a name."""

from __future__ import annotations

import math

import pytest

from fedkeel.config import Config
from fedkeel.engine.schedules import SCHEDULES, Schedule, check, learning_rate_at
from fedkeel.errors import FedkeelError
from tests import tiny


def rates(schedule: str, rounds: int = 10) -> list[float]:
    config = Config(learning_rate=0.5, schedule=schedule, rounds=rounds)
    check(config)
    return [learning_rate_at(config, round) for round in range(rounds)]


def test_the_old_ones_are_as_ever() -> None:
    assert rates("constant") == [0.5] * 10
    assert rates("exponential(decay=0.9)") == [0.5 * 0.9**r for r in range(10)]
    assert rates("cosine") == [0.5 * (1 + math.cos(math.pi * r / 10)) / 2 for r in range(10)]


def test_steps() -> None:
    assert rates("step(every=4, factor=0.5)") == [0.5] * 4 + [0.25] * 4 + [0.125] * 2
    assert rates("step")[0] == 0.5


@pytest.mark.parametrize(
    ("schedule", "told"),
    [("step", True), ("step(every=2)", False), ("constant", False), ("warmup(rounds=1)", True), ("cosine", False)],
)
def test_one_that_never_changes_the_rate_is_told(schedule: str, told: bool, caplog: pytest.LogCaptureFixture) -> None:
    tiny.setup(schedule=schedule, rounds=3)
    assert (f"'{schedule}' leaves the learning rate as it is in all rounds" in caplog.text) == told


def test_a_warm_up_climbs_and_then_another_schedule_begins() -> None:
    assert rates("warmup(rounds=4)")[:6] == [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]
    after = rates("warmup(rounds=4, then=cosine)")
    assert after[:4] == [0.125, 0.25, 0.375, 0.5]
    assert after[4:] == rates("cosine", rounds=6)
    assert rates("warmup(rounds=4, then='step(every=2, factor=0.1)')")[4:8] == pytest.approx([0.5, 0.5, 0.05, 0.05])
    assert rates("warmup(rounds=2, then='exponential(decay=0.5)')")[2:5] == [0.5, 0.25, 0.125]


def test_one_of_one_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SCHEDULES, "_entries", dict(SCHEDULES._entries))

    @SCHEDULES.register("halves")
    def halves(at: float = 0.5) -> Schedule:
        return lambda round, rounds: 1.0 if round < at * rounds else 0.5

    assert rates("halves(at=0.2)", rounds=5) == [0.5, 0.25, 0.25, 0.25, 0.25]
    assert rates("warmup(rounds=1, then=halves)", rounds=5) == [0.5, 0.5, 0.5, 0.25, 0.25]
    SCHEDULES.register("wrong")(lambda: lambda round, _: -1.0 if round == 3 else 1.0)
    with pytest.raises(FedkeelError, match=r"The schedule 'wrong' gives -1.0 for round 4: it must give a factor"):
        rates("wrong")
    SCHEDULES.register("failing")(lambda: lambda round, rounds: 1 / (rounds - round - 9))
    with pytest.raises(FedkeelError, match="gives 'ZeroDivisionError: division by zero' for round 2"):
        rates("failing")
    SCHEDULES.register("text")(lambda: lambda _round, _rounds: "much")
    with pytest.raises(FedkeelError, match="gives 'much' for round 1"):
        rates("text")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("cosin", "did you mean 'cosine'?"),
        ("step(evry=3)", "did you mean 'every'?"),
        ("step(every=0)", "The 'every' of step is 0: give at least 1."),
        ("warmup(then=cosin)", "did you mean 'cosine'?"),
        ("warmup(then=5)", "is 5, which is not text"),
        ("exponential(decay=2)", "at most 1"),
        ("step(every=1, factor=1e99)", "OverflowError"),
    ],
)
def test_one_sentence_says_what_to_give(text: str, sentence: str) -> None:
    with pytest.raises(FedkeelError) as refused:
        rates(text)
    assert sentence in str(refused.value)
