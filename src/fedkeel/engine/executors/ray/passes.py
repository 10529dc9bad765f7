"""One pass over clients: all of a round train, answer or are evaluated, wherever there is an actor for them.

What an actor that dies has not delivered, or has only added to a sum that died with it, is done again elsewhere.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedkeel.config import from_one
from fedkeel.core.state import Tensors
from fedkeel.engine.executors.executor import Attendance, Part
from fedkeel.engine.executors.ray import parcels
from fedkeel.engine.executors.ray.crew import TICK, Crew, Seat, tell
from fedkeel.engine.executors.ray.memory import Kept, RemoteMemory, given
from fedkeel.engine.executors.ray.schedule import Schedule, Speeds
from fedkeel.engine.executors.ray.station import Order
from fedkeel.errors import FedkeelError, ShortageError, TrainingError
from fedkeel.stopping import Stopped, stop_requested

log = logging.getLogger("fedkeel")
SHORT = 0.05  # seconds of a client, of which one call has several
MOST_ATTEMPTS = 4  # of a client whose actors die
Outcome = tuple[dict[str, Any], dict[str, Tensors]]


@dataclass(eq=False)
class Call:
    """Some tasks at one actor, whose replies come as it is done with them."""

    left: list[int]
    stream: Any
    work: float
    began: float
    heard: float = 0.0  # when it last said anything
    half: tuple[int, Outcome, int] | None = None  # a reply whose memory is still to come,
    memory: Any = None  # and that memory, until it is said to be whole


@dataclass
class Pass:
    crew: Crew
    memory: RemoteMemory
    speeds: Speeds
    attendance: Attendance
    order: Order
    broadcast: Any  # Ray's reference
    size: int  # its bytes
    parts: Sequence[Part]
    work: Sequence[float]
    _done: set[int] = field(default_factory=set)
    _attempts: Counter[int] = field(default_factory=Counter)
    _before: dict[str, Any] = field(default_factory=dict)  # what clients remembered when the pass began
    _reached: set[str] = field(default_factory=set)  # nodes that have the broadcast

    def __post_init__(self) -> None:
        self.schedule = Schedule(self.work)
        self.speeds.relax()
        for seat in list(self.crew.seats):
            seat.holds, seat.idle_since = [], time.perf_counter()
            if seat.calls:  # of a pass that was given up: it is still at it
                self.crew.dismiss(seat)

    def run(self) -> Iterator[tuple[int, Outcome]]:
        """Every task's outcome with its place, as they come; of one that is done for the sum's sake once more, none."""
        while not self._is_over:
            if stop_requested.is_set():
                raise Stopped
            self.crew.attend()
            self._dispatch()
            for place, outcome in self._hear():
                if place not in self._done:
                    self._done.add(place)
                    yield place, outcome

    @property
    def _is_over(self) -> bool:
        return not len(self.schedule) and not any(seat.calls for seat in self.crew.seats)

    # -- sending ---------------------------------------------------------------------------------------------
    def _dispatch(self) -> None:
        now, seats = time.perf_counter(), sorted(self.crew.seats, key=lambda seat: -self.speeds[seat])
        free = {seat: self._free(seat, now) for seat in seats}
        for depth in (1, 2):  # first who has nothing to do
            for seat in seats:
                if not len(self.schedule) or len(seat.calls) >= depth:
                    continue
                if depth == 2 and (seat.width > 1 or len(self.schedule) < len(seats)):
                    continue
                if places := self.schedule.next(seat, free, self.speeds, self._at_a_time(seat), self._is_home):
                    self._send(seat, places)
                    free[seat] = self._free(seat, now)

    def _at_a_time(self, seat: Seat) -> int:
        """Clients that one call has at least: several where each is so short that calls would be most of the work."""
        short = self.speeds.know([seat]) and max(self.work) < SHORT * self.speeds[seat]
        return max(seat.width, 2) if short else seat.width

    def _free(self, seat: Seat, now: float) -> float:
        """In how many seconds it will have done what it has."""
        if not seat.calls:
            return 0.0
        expected: float = sum(call.work for call in seat.calls) / self.speeds[seat]
        return max(0.0, expected - now + float(seat.calls[0].began))

    def _is_home(self, seat: Any, place: int) -> bool | None:
        home = self.memory.node(self.parts[place][0])
        return home == seat.node.id if home else None

    def _send(self, seat: Seat, places: list[int]) -> None:
        tasks = [(place, *self.parts[place]) for place in places]
        memories = []
        for _, client, _ in tasks:
            kept = self._before.setdefault(client, self.memory.present(client))
            if isinstance(kept, Kept) and kept.node != seat.node.id:
                self.crew.count(seat.node, bytes_down=kept.nbytes)
            memories.append(given(kept))
        if seat.node.id not in self._reached:
            self._reached.add(seat.node.id)
            self.crew.count(seat.node, bytes_down=self.size)
        stream = seat.handle.work.options(num_returns="streaming").remote(self.order, [self.broadcast], tasks, memories)
        now = time.perf_counter()
        if not seat.calls:
            self.crew.count(seat.node, waiting=now - seat.idle_since)
        seat.calls.append(Call(places, stream, sum(map(self.schedule.work, places)), now))
        if len(seat.calls) == 1:
            self._at_work(seat.calls[0], seat.width)

    def _at_work(self, call: Call, width: int) -> None:
        call.began = time.perf_counter()
        self._begin(call.left if width > 1 else call.left[:1])

    def _begin(self, places: Sequence[int]) -> None:
        if self.order.do == "train":
            self.attendance.begin(*(self.parts[place][0] for place in places))

    # -- hearing ---------------------------------------------------------------------------------------------
    def _hear(self) -> Iterator[tuple[int, Outcome]]:
        import ray

        busy = {seat.calls[0].stream: seat for seat in self.crew.seats if seat.calls}
        if not busy:
            time.sleep(TICK / 10)  # for an actor that is being started
            return
        ready, _ = ray.wait(list(busy), num_returns=1, timeout=TICK, fetch_local=False)
        patience = self.crew.config.round_timeout
        for seat in busy.values():
            call = seat.calls[0]
            if call.stream not in ready and time.perf_counter() - max(call.began, call.heard) > patience:
                yield from self._lose(seat, f"has not said anything for {patience:g} s")
        for stream in ready:
            seat = busy[stream]
            seat.calls[0].heard = time.perf_counter()
            try:
                outcome = self._take(seat, seat.calls[0])
            except ray.exceptions.RayError:
                yield from self._lose(seat)
            else:
                if outcome is not None:
                    yield outcome

    def _take(self, seat: Seat, call: Call) -> tuple[int, Outcome] | None:
        """The next thing that an actor says, if it completes an outcome."""
        import ray

        try:
            item = next(call.stream)
        except StopIteration:
            self._over(seat, call)
            return None
        if call.half is not None and call.memory is None:
            call.memory = item
            return None
        if call.half is not None:
            ray.get(item)
            (place, outcome, size), kept = call.half, call.memory
            call.half = call.memory = None
            self.memory.keep(self.parts[place][0], Kept(kept, seat.node.id, size))
            return self._counted(seat, call, place, outcome)
        header, parcel = ray.get(item)
        self.crew.count(seat.node, bytes_up=parcels.nbytes(parcel))
        for note in header.pop("notes", ()):
            tell(seat.node, note)
        place = header.pop("place")
        self._refuse(seat, call, place, header)
        if "lost" in header:
            return None
        outcome = header, parcels.unpacked(parcel)
        if size := header.pop("remembers", 0):
            call.half = place, outcome, size
            return None
        if self.order.do != "evaluate" and "failure" not in header:
            self.memory.keep(self.parts[place][0], {})
        return self._counted(seat, call, place, outcome)

    def _counted(self, seat: Seat, call: Call, place: int, outcome: Outcome) -> tuple[int, Outcome]:
        call.left.remove(place)
        self.attendance.end(self.parts[place][0])
        self.crew.did_well(seat)
        self.crew.count(seat.node, clients=int(self.order.do == "train"))
        if "sent" in outcome[0].get("message", {}) or self.memory.node(self.parts[place][0]) == seat.node.id:
            seat.holds.append(place)
        if not call.left:
            self._over(seat, call)
        elif seat.width == 1:  # one after another
            self._begin(call.left[:1])
        return place, outcome

    def _refuse(self, seat: Seat, call: Call, place: int, header: dict[str, Any]) -> None:
        client = self.parts[place][0]
        if "mistake" in header:
            raise FedkeelError(header["mistake"])
        if "error" in header:
            raise RuntimeError(f"Client '{client}' failed on the node '{seat.node.name}':\n{header['error']}")
        if "shortage" in header:
            raise ShortageError(f"On the node '{seat.node.name}': {header['shortage']}")
        if "lost" in header:  # what a client remembered, with a node that is gone
            for other in {self.parts[left][0] for left in call.left}:
                self._before[other] = self.memory.recovered(other, self._before[other])

    def _over(self, seat: Seat, call: Call) -> None:
        now = time.perf_counter()
        seat.calls.remove(call)
        self.schedule.put_back(call.left)
        if not call.left:
            self.speeds.measure(seat, call.work, now - call.began)
        self.crew.count(seat.node, busy=now - call.began)
        seat.idle_since = now
        if seat.calls:
            self._at_work(seat.calls[0], seat.width)
        elif self._is_over:
            for other in self.crew.seats:
                self.crew.count(other.node, waiting=now - other.idle_since)

    def _lose(self, seat: Seat, became: str = "died") -> Iterator[tuple[int, Outcome]]:
        """An actor is gone, and perhaps its node: what it had to do, had only added up, or was to remember is done
        again."""
        places = [place for call in seat.calls for place in call.left]
        again = places + seat.holds
        why = f"its actor on the node '{seat.node.name}' {became}"
        for place in places:
            self.attendance.end(self.parts[place][0])
        self._attempts.update(places[: seat.width])  # of those that were at work, one may be the cause
        seat.calls, seat.holds = [], []
        self.crew.dismiss(seat)
        self.speeds.forget(seat)
        lost = [place for place in places if self._attempts[place] >= MOST_ATTEMPTS]
        count = len({self.parts[place][0] for place in again})
        log.warning(
            "Round %d: the actor on the node '%s' %s; what it had to do for %s is done again.",
            from_one(self.order.header["round"]), seat.node.name, became, f"{count} client{'s' * (count != 1)}",
        )  # fmt: skip
        self.schedule.put_back([place for place in again if place not in lost])
        for place in lost:
            if place in self._done:
                raise TrainingError(f"'{self.parts[place][0]}' cannot be trained once more: {why}.")
            yield place, ({"failure": f"{why}, for the {MOST_ATTEMPTS}th time"}, {})

    # -- sums ------------------------------------------------------------------------------------------------
    def mean(self, weight: int) -> Tensors:
        """The mean of all that was added up, of this weight: over the actors of each node, then over nodes."""
        import ray

        while True:
            try:
                found, parcel = self._combined()
            except ray.exceptions.RayError:
                self._find_dead()
                for _ in self.run():  # those that were lost, which have been told of already
                    pass
            else:
                break
        if found != weight:
            raise RuntimeError(f"The sums of the nodes weigh {found}, and their clients {weight}.")
        return parcels.unpacked(parcel)["mean"]

    def _combined(self) -> tuple[int, parcels.Parcel]:
        import ray

        by_node: dict[str, list[Seat]] = {}
        for seat in self.crew.seats:
            if seat.holds:
                by_node.setdefault(seat.node.id, []).append(seat)
        here = self.crew.cluster.here
        places = sorted(by_node, key=lambda node: (node != here, node))
        root = by_node[places[0]][0]
        sums = []
        for node in places:
            seats = by_node[node]
            taken = [seat.handle.take_sum.remote(self.order.number) for seat in seats]
            if len(seats) > 1 and len(places) > 1:
                taken = [seats[0].handle.combine.remote(self.order, [self.broadcast], taken, finish=False)]
            if node != places[0]:
                self.crew.count(seats[0].node, bytes_between=8 * self.size // 4)
            sums += taken
        weight, parcel = ray.get(root.handle.combine.remote(self.order, [self.broadcast], sums, finish=True))
        self.crew.count(root.node, bytes_up=parcels.nbytes(parcel))
        return weight, parcel

    def _find_dead(self) -> None:
        import ray

        for seat in [seat for seat in self.crew.seats if seat.holds]:
            try:
                ray.get(seat.handle.hello.remote())
            except ray.exceptions.RayError:
                for _ in self._lose(seat):
                    pass
