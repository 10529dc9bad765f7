"""Who does which client next: the longest first, by actors of different speeds.

An actor that has nothing to do takes the longest client that nobody else would have done sooner: a fast one that is
busy may still end it before a slow one that is free. How fast an actor is shows as rounds go by.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

AtHome = Callable[[Any, int], bool | None]  # whether the memory of a task's client is with an actor; None: nowhere
MOST_LOOKED_AT = 64
WORTH_WAITING = 0.05  # of a task's time: who gains less by leaving it to a faster actor does it itself
MEMORY = 0.5  # what the newest measurement of a speed counts


class Speeds:
    """Of each actor, in units of work a second; of one that has done nothing yet, the mean of the others."""

    def __init__(self) -> None:
        self._known: dict[Hashable, float] = {}
        self._fresh: set[Hashable] = set()  # measured since the last round

    def __getitem__(self, actor: Hashable) -> float:
        if actor in self._known:
            return self._known[actor]
        return sum(self._known.values()) / len(self._known) if self._known else 1.0

    def measure(self, actor: Hashable, work: float, seconds: float) -> None:
        speed = work / max(seconds, 1e-9)
        self._fresh.add(actor)
        self._known[actor] = MEMORY * speed + (1 - MEMORY) * self._known.get(actor, speed)

    def know(self, actors: Iterable[Hashable]) -> bool:
        return all(actor in self._known for actor in actors)

    def relax(self) -> None:
        """A new round: who did nothing in the last one, because it seemed slow, may be faster than that."""
        mean = sum(self._known.values()) / len(self._known) if self._known else 1.0
        for actor in self._known.keys() - self._fresh:
            self._known[actor] = MEMORY * max(mean, self._known[actor]) + (1 - MEMORY) * self._known[actor]
        self._fresh = set()

    def forget(self, actor: Hashable) -> None:
        self._known.pop(actor, None)


class Schedule:
    """The tasks of a round that wait, as their places in a list.

    >>> tasks = Schedule([5.0, 40.0, 10.0, 20.0])
    >>> speeds = Speeds()
    >>> tasks.next("fast", {"fast": 0, "slow": 0}, speeds), tasks.next("slow", {"fast": 40, "slow": 0}, speeds)
    ([1], [3])
    """

    def __init__(self, work: Sequence[float]) -> None:
        self._work = [max(float(amount), 1e-9) for amount in work]
        self._waiting: list[tuple[float, int]] = sorted((self._work[p], -p) for p in range(len(self._work)))

    def __len__(self) -> int:
        return len(self._waiting)

    def work(self, place: int) -> float:
        return self._work[place]

    def put_back(self, places: Sequence[int]) -> None:
        self._waiting = sorted([*self._waiting, *((self._work[place], -place) for place in places)])

    def next(
        self,
        actor: Hashable,
        free: Mapping[Any, float],
        speeds: Speeds,
        width: int = 1,
        at_home: AtHome | None = None,
    ) -> list[int]:
        """What an actor should do next; `free` says in how many seconds each will have done what it has.

        One that does `width` clients side by side gets its share of all that waits at once, dealt out like cards, once
        the speed of every actor is known; before that half of it, so that there is something left for who ends first.
        Nothing where all that waits is done sooner by others.
        """
        end = self._end(actor, free, speeds)
        if not end:
            return []
        idle = [other for other in free if other == actor or free[other] <= free[actor]]
        if width == 1 or len(self._waiting) <= len(idle):
            return [-self._waiting.pop(self._preferred(actor, end, at_home))[1]]
        part = speeds[actor] / sum(speeds[other] for other in idle)
        if len(free) > 1 and not speeds.know(free) and len(self._waiting) > width * len(free):
            part /= 2
        return self._deal(actor, part, at_home)

    def _deal(self, actor: Hashable, part: float, at_home: AtHome | None) -> list[int]:
        """Of all that waits this part of the work: first who is at home there, then of the others every so many."""
        wanted, taken = part * sum(work for work, _ in self._waiting), set()
        for entry in reversed(self._waiting):
            if wanted > 0 and at_home is not None and at_home(actor, -entry[1]):
                taken.add(entry)
                wanted -= entry[0]
        others = [entry for entry in reversed(self._waiting) if entry not in taken]
        part = wanted / max(sum(work for work, _ in others), 1e-9)
        seen = given = 0.0
        for entry in others:
            seen += entry[0]
            if given + entry[0] / 2 <= part * seen:
                taken.add(entry)
                given += entry[0]
        dealt = [-entry[1] for entry in reversed(self._waiting) if entry in taken]
        self._waiting = [entry for entry in self._waiting if entry not in taken]
        return dealt

    def _preferred(self, actor: Hashable, end: int, at_home: AtHome | None) -> int:
        """Of the longest, and those of more than half of its length, the first that is at home with this actor."""
        longest, last = self._waiting[end - 1][0], end - 1
        for place in range(last, max(-1, last - MOST_LOOKED_AT), -1):
            if at_home is None or self._waiting[place][0] * 2 < longest:
                break
            if at_home(actor, -self._waiting[place][1]) is not False:
                return place
        return last

    def _end(self, actor: Hashable, free: Mapping[Any, float], speeds: Speeds) -> int:
        """Up to the longest that this actor would have done first, if all longer ones went to who does them first."""
        until, slowness = dict(free), {other: 1 / speeds[other] for other in free}
        for place in range(len(self._waiting) - 1, -1, -1):
            amount = self._waiting[place][0]
            ends = {other: until[other] + amount * slowness[other] for other in until}
            first = min(ends, key=ends.__getitem__)
            if ends[actor] <= ends[first] + WORTH_WAITING * amount * slowness[actor]:
                return place + 1
            until[first] = ends[first]
        return 0
