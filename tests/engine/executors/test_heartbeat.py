from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from fedkeel.engine.executors.heartbeat import LOOK, Heart
from tests.processes import ended, forked


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def heart(clock: Clock) -> Heart:
    return Heart(60.0, clock)


def looks(
    heart: Heart, clock: Clock, count: int, every: float, between: Callable[[], None] = lambda: None
) -> list[bool]:
    answers = []
    for _ in range(count):
        clock.now += every
        between()
        answers.append(heart.is_silent())
    return answers


def test_a_minute_without_a_beat_is_too_long(heart: Heart, clock: Clock) -> None:
    assert looks(heart, clock, 300, 0.25).index(True) == 240


def test_one_that_beats_may_take_as_long_as_it_likes(heart: Heart, clock: Clock) -> None:
    assert not any(looks(heart, clock, 100_000, 0.5, heart.beat))


def test_a_beat_makes_up_for_all_the_silence_before(heart: Heart, clock: Clock) -> None:
    for _ in range(5):
        assert not any(looks(heart, clock, 59, 1.0))
        heart.beat()
        assert not any(looks(heart, clock, 1, 1.0))


@pytest.mark.parametrize("away", [61, 3600, 1e6])
def test_while_the_watching_process_is_suspended_or_starved_no_time_counts(
    heart: Heart, clock: Clock, away: float
) -> None:
    assert not any(looks(heart, clock, 50, away))  # each look counts a second, however late it comes
    assert LOOK == 1.0


def test_it_beats_while_the_process_is_busy_and_stops_with_it() -> None:
    clock = Clock()
    heart = Heart(60.0, clock)

    def work() -> None:
        heart.start()
        while True:  # in Python, and without a pause
            pass

    child = forked(work)
    try:
        for _ in range(2):
            before = heart._beats[0]
            while heart._beats[0] == before:  # as long as it takes
                os.sched_yield()
        os.kill(child, signal.SIGSTOP)
        os.waitpid(child, os.WUNTRACED)
        assert looks(heart, clock, 70, 1.0)[-1]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_process_that_is_watched_ends_with_the_one_that_watches_it() -> None:
    reading, writing = os.pipe()

    def watch() -> None:
        heart = Heart()

        def work() -> None:
            heart.start()
            os.write(writing, str(os.getpid()).encode())
            while True:
                signal.pause()

        forked(work)
        signal.pause()

    watcher = forked(watch)
    child = int(os.read(reading, 20))
    os.kill(watcher, signal.SIGKILL)
    os.waitpid(watcher, 0)
    ended([child])
