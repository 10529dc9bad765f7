"""The executor `sites`: each client is a site at the other end of a network.

It speaks to sites through a `Channel` and knows nothing of what carries it. A site that is away, fails, or sends what
cannot be read is `Missing` with the reason; the others go on. What sites remember stays with them; a result says after
which of the site's steps that counts.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedkeel.config import Config, from_one
from fedkeel.core import messages
from fedkeel.core.checking import check_samples
from fedkeel.core.evaluation import Evaluation
from fedkeel.core.messages import Answer, BadMessage, Broadcast, Missing, Update
from fedkeel.engine.executors.executor import EXECUTORS, Executor
from fedkeel.engine.executors.sites.channel import STEPS, Channel, Table, largest_reply, read_reply, wait
from fedkeel.engine.executors.sites.replies import evaluations_of
from fedkeel.engine.executors.sites.roster import Roster
from fedkeel.engine.metrics import asked
from fedkeel.engine.tasks import Result, Task, fetched

COUNTED = "step"
Show = Callable[[Collection[str], str, bool], None]
Outcome = Update | Answer | list[Evaluation]
AWAY, HANGING = "it is not connected", "it did not reply to an earlier request of this round"


@EXECUTORS.register("sites")
@dataclass
class SitesExecutor(Executor):
    """Clients at other machines, over a network.

    Attributes:
        session: what every request carries: the run's name, the configuration, the classes.
        note: is told whom it waits for.
        show: is told what sites do, by name: names, what, and whether they are connected.
    """

    channel: Channel
    roster: Roster
    session: Table
    config: Config
    note: Callable[[str], None]
    show: Show
    _hanging: set[str] = field(default_factory=set)
    _step: int = -1

    @classmethod
    def cannot_run(cls, config: Config, device: torch.device) -> str:  # noqa: ARG003
        return "is that of a federation over a network: start one with 'fedkeel server', or choose 'auto'."

    def map(self, tasks: Sequence[Task], broadcast: Broadcast) -> Iterator[Result[Any] | Missing]:
        """Send each client that is there its task; yield results as they come."""
        if not tasks:
            return
        if self._step // STEPS != broadcast.round:  # who hung in the last round has a new chance
            self._step, self._hanging = broadcast.round * STEPS - 1, set()
        self._step += 1
        of = {task.client: task for task in tasks}
        least = {"train": self.config.min_clients, "answer": 0, "evaluate": 1}[tasks[0].do]
        there = self._await(of, min(least, len(of)))
        for name in [name for name in of if name not in there - self._hanging]:  # who hangs is not waited for again
            del of[name]
            reason = HANGING if name in self._hanging else AWAY
            self.show([name], reason, name in there)
            yield Missing(name, reason)
        yield from self._exchange(of, f"round {from_one(broadcast.round)}: {tasks[0].do}", broadcast)

    def close(self) -> None:
        """Sites stay up for the next run."""

    def _await(self, clients: Collection[str], least: int) -> set[str]:
        """Those of these that are there; it waits for `least` of them, no longer than a round may take."""
        there: set[str] = set()

        def absent() -> str:
            there.clear()
            there.update(name for name in self.channel.sites() if name in clients)
            away = ", ".join(sorted({*clients} - there))
            needed = f"{len(there)} sites are connected, and {least} are needed: waiting for {away}."
            return needed if len(there) < least else ""

        wait(absent, self.note, self.config.round_timeout)
        return there

    def _exchange(self, tasks: dict[str, Task], doing: str, broadcast: Broadcast) -> Iterator[Result[Any] | Missing]:
        common = {"session": self.session, "step": self._step}
        requests = {name: common | request(task) for name, task in tasks.items()}
        message, timeout = messages.broadcast_to_bytes(broadcast), self.config.round_timeout
        self.show(tasks, f"{doing}, under way", True)
        began, silent = time.perf_counter(), dict.fromkeys(tasks)
        for client, reply in self.channel.exchange(requests, message, timeout):
            silent.pop(client, None)
            try:
                with read_reply(reply, largest_reply(len(message))) as (table, data):
                    outcome = self._outcome(tasks[client], table, data)
                self.show([client], f"{doing}, done", True)
                yield Result(client, outcome, {COUNTED: torch.tensor(self._step)}, time.perf_counter() - began)
            except BadMessage as bad:
                self.show([client], f"{doing} failed, {bad}", True)
                yield Missing(client, str(bad))
        self._hanging.update(silent)
        self.show(silent, f"{doing}, no reply", False)
        for client in silent:
            yield Missing(client, f"it did not reply within {timeout:g} s")

    def _outcome(self, task: Task, table: Table, data: bytes) -> Outcome:
        """What a reply says."""
        if task.do == "train":
            update = messages.update_from_bytes(data)
            if update.client != task.client:
                raise BadMessage(f"it is signed '{update.client[:80]}'")
            return update
        if task.do == "answer":
            samples: Any = table.get("samples")
            check_samples(samples)
            return Answer(task.client, samples, messages.unpack(data)[1].get("tensors", {}))
        domain, classes = self.roster[task.client].domain, len(self.roster.classes)
        found = evaluations_of(task.client, domain, table.get("evaluations"), asked(self.config), classes)
        return found if task.detailed else [replace(evaluation, details=None) for evaluation in found]


def request(task: Task) -> Table:
    """`after`: the step after which the site's memory counts; -1: what it was at first."""
    asked_for: dict[str, Table] = {
        "train": {},
        "answer": {"question": task.question},
        "evaluate": {"splits": list(task.splits), "detailed": task.detailed},
    }
    return {"do": task.do, **asked_for[task.do], "after": int(fetched(task.memory).get(COUNTED, -1))}
