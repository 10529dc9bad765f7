"""Who does which client next: facts of single decisions, and of whole rounds that are played through."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeel.engine.executors.ray.schedule import Schedule, Speeds


def known(**speeds: float) -> Speeds:
    made = Speeds()
    for actor, speed in speeds.items():
        made.measure(actor, speed, 1.0)
    return made


def idle(*actors: str) -> dict[str, float]:
    return dict.fromkeys(actors, 0.0)


# -- one decision ------------------------------------------------------------------------------------------------------
def test_the_longest_comes_first_and_of_equal_ones_the_first() -> None:
    tasks = Schedule([3.0, 7.0, 5.0, 7.0])
    speeds = Speeds()
    assert [tasks.next("a", idle("a"), speeds) for _ in range(5)] == [[1], [3], [2], [0], []]
    assert len(tasks) == 0


def test_a_slow_one_leaves_to_a_fast_busy_one_what_that_ends_sooner() -> None:
    """It takes ten times as long as the fast one; which first does those that are longer."""
    speeds = known(fast=10.0, slow=1.0)
    tasks = Schedule([100.0, 30.0])
    assert tasks.next("slow", {"fast": 2.0, "slow": 0.0}, speeds) == []  # 30 s here; 2, 10 and 3 s there
    assert len(tasks) == 2
    assert tasks.next("slow", {"fast": 20.0, "slow": 0.0}, speeds) == [1]
    tasks = Schedule([100.0, 30.0, 10.0])
    assert tasks.next("slow", {"fast": 2.0, "slow": 0.0}, speeds) == [2]  # 10 s here; 2, 10, 3 and 1 s there
    assert tasks.next("fast", {"fast": 0.0, "slow": 10.0}, speeds) == [0]
    assert tasks.next("slow", {"fast": 10.0, "slow": 0.0}, speeds) == []  # 30 s here; 10 and 3 s there


def test_the_fastest_that_is_free_takes_the_longest() -> None:
    tasks = Schedule([1.0, 100.0])
    assert tasks.next("fast", idle("fast", "slow"), known(fast=2.0, slow=1.0)) == [1]


def test_a_busy_one_does_not_take_ahead_what_a_free_one_ends_sooner() -> None:
    assert Schedule([1.0]).next("fast", {"fast": 9.0, "slow": 0.0}, known(fast=2.0, slow=1.0)) == []


def test_nearly_equal_speeds_are_equal() -> None:
    """Measurements differ by some percent, and nobody should wait for that."""
    tasks = Schedule([10.0])
    assert tasks.next("a", {"a": 0.0, "b": 0.001}, known(a=1.0, b=1.03)) == [0]


def test_a_wide_actor_gets_its_share_at_once_of_long_and_short_ones() -> None:
    tasks = Schedule([float(length) for length in range(1, 41)])
    speeds = known(a=1.0, b=3.0)
    much = tasks.next("b", idle("a", "b"), speeds, width=4)
    rest = tasks.next("a", {"a": 0.0, "b": 99.0}, speeds, width=4)
    assert sorted(much + rest) == list(range(40))
    assert abs(sum(map(tasks.work, much)) - 0.75 * 820) <= 40  # of all work, but for one task
    assert max(map(tasks.work, rest)) > 30
    assert min(map(tasks.work, much)) < 10
    assert much == sorted(much, reverse=True)  # the longest first


def test_while_speeds_are_not_known_half_of_a_share_is_kept_for_who_ends_first() -> None:
    tasks = Schedule([1.0] * 40)
    assert len(tasks.next("a", idle("a", "b"), Speeds(), width=4)) == 10
    assert len(Schedule([1.0] * 40).next("a", idle("a"), Speeds(), width=4)) == 40  # there is nobody else


def test_where_there_are_few_everybody_gets_one() -> None:
    tasks = Schedule([1.0] * 3)
    taken = [tasks.next(one, idle("a", "b", "c"), known(a=1.0, b=1.0, c=1.0), width=8) for one in "abc"]
    assert taken == [[0], [1], [2]]


def test_a_wide_actor_gets_those_who_are_at_home_there() -> None:
    tasks = Schedule([1.0] * 12)
    taken = tasks.next("a", idle("a", "b"), known(a=1.0, b=1.0), 4, lambda actor, place: (actor == "a") == (place > 7))
    assert {8, 9, 10, 11} < set(taken)
    assert len(taken) == 6


def test_a_client_goes_home_if_that_is_nearly_as_long_as_the_longest() -> None:
    homes = {0: "far", 1: "far", 2: "here", 3: "here"}

    def at_home(actor: object, place: int) -> bool:
        return homes[place] == actor

    tasks = Schedule([10.0, 9.0, 6.0, 4.0])
    assert tasks.next("here", idle("here", "far"), Speeds(), at_home=at_home) == [2]
    assert tasks.next("here", idle("here", "far"), Speeds(), at_home=at_home) == [0]  # 4 is less than half of 10
    assert len(tasks) == 2


def test_what_is_put_back_comes_again_in_its_order() -> None:
    tasks = Schedule([1.0, 5.0, 3.0])
    assert tasks.next("a", idle("a"), Speeds()) == [1]
    tasks.put_back([1])
    assert tasks.work(1) == 5.0
    assert [tasks.next("a", idle("a"), Speeds()) for _ in range(3)] == [[1], [2], [0]]


def test_clients_without_samples_are_done_too() -> None:
    tasks = Schedule([0.0, 0.0])
    assert [tasks.next("b", idle("a", "b"), known(a=1.0, b=5.0)) for _ in range(3)] == [[0], [1], []]


# -- speeds ------------------------------------------------------------------------------------------------------------
def test_one_that_has_done_nothing_is_as_fast_as_the_others_are_together() -> None:
    assert Speeds()["new"] == 1.0
    assert known(a=2.0, b=4.0)["new"] == 3.0


def test_a_speed_follows_what_is_measured() -> None:
    speeds = known(a=8.0)
    assert speeds["a"] == 8.0
    for _ in range(20):
        speeds.measure("a", 2.0, 1.0)
    assert math.isclose(speeds["a"], 2.0, rel_tol=1e-3)
    speeds.measure("a", 1.0, 0.0)  # a clock that does not see it
    assert math.isfinite(speeds["a"])


def test_who_was_slow_once_is_tried_again() -> None:
    """It did nothing since, so nobody knows; what has been measured in the last round stays."""
    speeds = known(fast=10.0, once=0.01)
    speeds.relax()
    waits = []
    for number in range(50):
        tasks = Schedule([1.0] * 4)
        assert tasks.next("fast", idle("fast", "once"), speeds) == [0]
        speeds.measure("fast", 10.0, 1.0)
        if tasks.next("once", {"fast": 0.1, "once": 0.0}, speeds):
            break
        waits.append(number)
        speeds.relax()
    else:
        raise AssertionError("it never came to its turn")
    assert waits, "it should not be tried at once"
    assert speeds["fast"] == 10.0


def test_relaxing_makes_nobody_slower() -> None:
    speeds = known(a=1.0, b=9.0)
    speeds.relax()
    assert (speeds["a"], speeds["b"]) == (1.0, 9.0)  # both did something in the round that is over
    speeds.relax()
    assert speeds["b"] == 9.0
    assert 1.0 < speeds["a"] < 9.0


def test_who_is_gone_does_not_count() -> None:
    speeds = known(a=2.0, b=100.0)
    speeds.forget("b")
    speeds.forget("never there")
    assert speeds["new"] == 2.0


# -- whole rounds ------------------------------------------------------------------------------------------------------
def play(work: Sequence[float], true: Sequence[float], estimates: Speeds, width: int = 1) -> tuple[float, list[int]]:
    """A round with actors of these speeds: when it ends, and what was handed out."""
    tasks, busy, handed = Schedule(work), [(0.0, actor) for actor in range(len(true))], []
    ends = [0.0] * len(true)  # when each is expected to be free
    waiting, last = set[int](), 0.0
    while busy:
        now, actor = heapq.heappop(busy)
        last = max(last, now)
        waiting.add(actor)
        while busy and busy[0][0] == now:
            waiting.add(heapq.heappop(busy)[1])
        for one in sorted(waiting, key=lambda other: -estimates[other]):
            free = {other: 0.0 if other in waiting else max(0.0, ends[other] - now) for other in range(len(true))}
            taken = tasks.next(one, free, estimates, width)
            if taken:
                amount = sum(tasks.work(place) for place in taken)
                waiting.remove(one)
                handed += taken
                ends[one] = now + amount / estimates[one]
                heapq.heappush(busy, (now + amount / true[one], one))
                estimates.measure(one, amount, amount / true[one])
    assert len(tasks) == 0, "some wait, and nobody is at work"
    return last, handed


works = st.lists(st.floats(0.1, 1000.0), min_size=1, max_size=40)
speeds_of = st.lists(st.floats(0.1, 100.0), min_size=1, max_size=6)


@given(works, speeds_of, st.integers(1, 5))
@settings(max_examples=200)
def test_every_task_is_handed_out_once_whatever_the_speeds(work: list[float], true: list[float], width: int) -> None:
    _, handed = play(work, true, Speeds(), width)  # nothing is known of them beforehand
    assert sorted(handed) == list(range(len(work)))


@given(works, speeds_of)
@settings(max_examples=300)
def test_a_round_of_known_speeds_ends_within_twice_the_shortest_time(work: list[float], true: list[float]) -> None:
    """The longest task first, to who would end it first: at most 2 - 2/(m+1) times the optimum on m machines (Gonzalez,
    Ibarra and Sahni, 1977). The optimum is not known here; it is no less than the mean load nor than the longest task
    on the fastest machine, and no less than the k longest on the k fastest."""
    estimates = Speeds()
    for actor, speed in enumerate(true):
        estimates.measure(actor, speed, 1.0)
    ended, _ = play(work, true, estimates)
    longest, fastest = sorted(work, reverse=True), sorted(true, reverse=True)
    least = max(sum(longest[:k]) / sum(fastest[:k]) for k in range(1, len(true) + 1))
    least = max(least, sum(work) / sum(true))
    assert ended <= 2 * least * 1.06  # speeds that differ by less than 5% are taken for equal
