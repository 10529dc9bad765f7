"""The learning rate from round to round: `--schedule 'step(every=30, factor=0.1)'`.

A schedule is a function of the round, counted from 0, and of their number; `learning_rate` is multiplied by what it
returns. One of your own: `@SCHEDULES.register("name")` above a function that takes its options and returns it.
"""

import math
from collections.abc import Callable

from fedkeel import spec
from fedkeel.config import Config, from_one
from fedkeel.errors import FedkeelError
from fedkeel.options import Count, Positive, PositiveShare, described
from fedkeel.registry import Registry

__all__ = ["SCHEDULES", "Schedule"]

Schedule = Callable[[int, int], float]
"""The round, from 0, and their number -> a factor of the learning rate."""
SCHEDULES: Registry[Schedule] = Registry("schedule")
"""The schedules by name."""


@SCHEDULES.register("constant")
def constant() -> Schedule:
    """The same in every round."""
    return lambda _round, _rounds: 1.0


@SCHEDULES.register("exponential")
def exponential(decay: PositiveShare = 0.998) -> Schedule:
    """Times `decay` in every round."""
    return lambda round, _: decay**round


@SCHEDULES.register("cosine")
def cosine() -> Schedule:
    """Down to nothing along half a cosine over all rounds."""
    return lambda round, rounds: (1 + math.cos(math.pi * round / rounds)) / 2


@SCHEDULES.register("step")
def step(every: Count = 30, factor: Positive = 0.1) -> Schedule:
    """Times `factor` after every `every` rounds."""
    return lambda round, _: factor ** (round // every)


@SCHEDULES.register("warmup")
def warmup(rounds: Count = 5, then: str = "constant") -> Schedule:
    """Up in equal steps over the first `rounds`; `then` another schedule over those that are left."""
    following, first = _build(then), rounds

    def factor(round: int, rounds: int) -> float:
        return (round + 1) / first if round < first else following(round - first, rounds - first)

    return factor


def learning_rate_at(config: Config, round: int) -> float:
    """The local learning rate in `round`."""
    return config.learning_rate * _of(config)(round, config.rounds)


def check(config: Config) -> None:
    """Refuse a schedule that is none, or that has no learning rate for some round."""
    schedule: Callable[[int, int], object] = _of(config)
    for round in range(config.rounds):
        try:
            factor = schedule(round, config.rounds)
        except Exception as error:  # somebody's own, or a number beyond all measure
            factor = f"{type(error).__name__}: {error}"
        if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            raise FedkeelError(
                f"The schedule '{config.schedule}' gives {described(factor)} for round {from_one(round)}: it must give "
                "a factor of the learning rate, from 0."
            )


def moves(config: Config) -> bool:
    """Whether any round's learning rate is another than the option's."""
    return any(learning_rate_at(config, round) != config.learning_rate for round in range(config.rounds))


def _of(config: Config) -> Schedule:
    return _build(config.schedule)


def _build(text: str) -> Schedule:
    given = spec.parse(text)
    return SCHEDULES.make(given.name, **given.options)
