"""The executor `sites`: each client is a site at the other end of a network.

It speaks to sites through a `Channel` and knows nothing of what carries it. A site that is away, fails, or sends what
cannot be read is `Missing` with the reason; the others go on. What sites remember stays with them; a result says after
which of the site's steps that counts.
"""

import functools
import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from fedkeel.config import STATISTICS, Config, from_one
from fedkeel.core import messages
from fedkeel.core.checking import check_samples
from fedkeel.core.evaluation import Evaluation
from fedkeel.core.messages import Answer, BadMessage, Broadcast, Missing, Update, is_whole, shown
from fedkeel.engine.executors.executor import EXECUTORS, Executor
from fedkeel.engine.executors.sites.channel import AWAY, Channel, Table, largest_reply, read_reply
from fedkeel.engine.executors.sites.roster import MOST_SAMPLES, Roster
from fedkeel.engine.measuring import ALWAYS
from fedkeel.engine.metrics import Metric, asked
from fedkeel.engine.tasks import Result, Task, fetched
from fedkeel.errors import StoreError
from fedkeel.files import write_to_show
from fedkeel.formulas.measures import Measure
from fedkeel.stopping import Stopped, stop_requested

STATUS = "status.json"
SPLITS = ("test", "validation")
COUNTED = "step"
NONE: Mapping[str, Metric] = MappingProxyType({})
LARGEST_LOSS = 1e15  # of a sample; a sum of such is still a number
POLL, TELL = 0.5, 10.0  # seconds between two looks at who is there, and between two words about who is not
ReadReply = Callable[[Task, Table, bytes], Any]
HANGING = "it did not reply to an earlier request of this round"


@dataclass
class Status:
    """What each site last did, in a file for whoever watches the run."""

    directory: Path | None = None
    sites: dict[str, Table] = field(default_factory=dict)

    def set(self, site: str, what: str, *, connected: bool = True) -> None:
        self.sites[site] = {"state": what, "connected": connected, "at": time.strftime("%Y-%m-%d %H:%M:%S")}

    def save(self) -> None:
        if self.directory is not None:
            write_to_show(self.directory / STATUS, json.dumps(self.sites, indent=1).encode() + b"\n")


def read_sites(directory: Path) -> dict[str, Table]:
    """What each site last did; one sentence where that cannot be read."""
    path = directory / STATUS
    try:
        sites = json.loads(path.read_bytes())
        return {name: {key: site[key] for key in ("state", "connected", "at")} for name, site in sites.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(
            f"'{path}' cannot be read ({type(error).__name__}): the server writes it anew at its next exchange."
        ) from error


@EXECUTORS.register("sites")
@dataclass
class SitesExecutor(Executor):
    """Clients at other machines, over a network.

    Attributes:
        channel: what carries requests and replies.
        roster: who takes part.
        session: what every request carries: the run's name, the configuration, the classes.
        note: is told whom it waits for.
    """

    channel: Channel
    roster: Roster
    session: Table
    config: Config
    note: Callable[[str], None]
    status: Status = field(default_factory=Status)
    _hanging: set[str] = field(default_factory=set)
    _step: tuple[int, int] = (-1, 0)

    @classmethod
    def cannot_run(cls, config: Config, device: torch.device) -> str:  # noqa: ARG003
        return "is that of a federation over a network: start one with 'fedkeel server', or choose 'auto'."

    # -- what the round loop asks for ------------------------------------------------------------------------
    def map(self, tasks: Sequence[Task], broadcast: Broadcast) -> Iterator[Result[Any] | Missing]:
        reads: dict[str, ReadReply] = {"train": self._update, "answer": self._answer, "evaluate": self._evaluations}
        least = {"train": self.config.min_clients, "answer": 0, "evaluate": 1}
        if tasks:
            do = tasks[0].do
            yield from self._exchange(tasks, broadcast, reads[do], min(least[do], len(tasks)))

    def _update(self, task: Task, _: Table, data: bytes) -> Update:
        update = messages.update_from_bytes(data)
        if update.client != task.client:
            raise BadMessage(f"it is signed '{update.client[:80]}'")
        return update

    def _answer(self, task: Task, table: Table, data: bytes) -> Answer:
        samples: Any = table.get("samples")
        check_samples(samples)
        return Answer(task.client, samples, messages.unpack(data)[1].get("tensors", {}))

    def _evaluations(self, task: Task, table: Table, _: bytes) -> list[Evaluation]:
        domain, classes = self.roster[task.client].domain, len(self.roster.classes)
        found = evaluations_of(task.client, domain, table.get("evaluations"), asked(self.config), classes)
        return found if task.detailed else [replace(evaluation, details=None) for evaluation in found]

    def close(self) -> None:
        self.status.save()

    # -- one exchange ----------------------------------------------------------------------------------------
    def _exchange(
        self, tasks: Sequence[Task], broadcast: Broadcast, read: ReadReply, least: int
    ) -> Iterator[Result[Any] | Missing]:
        """Send each client that is there its task; yield results as they come. What a site remembers after this step
        counts if its reply is accepted."""
        round, number = self._step
        self._step = (round, number + 1) if round == broadcast.round else (broadcast.round, 0)
        if round != broadcast.round:
            self._hanging.clear()
        of, doing = {task.client: task for task in tasks}, f"round {from_one(broadcast.round)}: {tasks[0].do}"
        there = self._await(of, least)
        common = {"session": self.session, "start": self.roster.starts, "step": list(self._step)}
        requests: dict[str, Table] = {}
        for client, task in of.items():
            # Who hangs would make everybody wait for the whole timeout once more; the next round is a new chance.
            if client not in there or client in self._hanging:
                self.status.set(client, AWAY, connected=client in there)
                yield Missing(client, HANGING if client in self._hanging else AWAY)
            else:
                self.status.set(client, f"{doing}, under way")
                requests[client] = common | request(task)
        self.status.save()
        message, timeout = messages.broadcast_to_bytes(broadcast), self.config.round_timeout
        began, silent = time.perf_counter(), dict.fromkeys(requests)
        for client, reply in self.channel.exchange(requests, message, timeout):
            silent.pop(client, None)
            try:
                outcome = read_reply(reply, functools.partial(read, of[client]), largest_reply(len(message)))
                self.status.set(client, f"{doing}, done")
                yield Result(client, outcome, {COUNTED: torch.tensor(self._step)}, time.perf_counter() - began)
            except BadMessage as bad:
                self.status.set(client, f"{doing} failed, {bad}", connected=str(bad) != AWAY)
                yield Missing(client, str(bad))
            self.status.save()  # who waits for the others sees who is done
        for client in silent:
            self._hanging.add(client)
            self.status.set(client, f"{doing}, no reply", connected=False)
            yield Missing(client, f"it did not reply within {timeout:g} s")
        self.status.save()

    def _await(self, clients: Collection[str], least: int) -> set[str]:
        """Those of these that are there; it waits for `least` of them, no longer than a round may take."""
        began = told = time.monotonic()
        while True:
            there = {client for client in self.channel.sites() if client in clients}
            now = time.monotonic()
            if len(there) >= least or now - began > self.config.round_timeout:
                return there
            if now >= told:
                absent = ", ".join(sorted({*clients} - there))
                self.note(f"{len(there)} sites are connected, and {least} are needed: waiting for {absent}.")
                told = now + TELL
            if stop_requested.wait(POLL):
                raise Stopped


def request(task: Task) -> Table:
    """`after`: the step after which the site's memory counts; None: what it was at first."""
    counted = fetched(task.memory).get(COUNTED)
    asked_for: dict[str, Table] = {
        "train": {},
        "answer": {"question": task.question},
        "evaluate": {"splits": list(task.splits), "detailed": task.detailed},
    }
    return {"do": task.do, **asked_for[task.do], "after": None if counted is None else counted.tolist()}


def evaluations_of(
    client: str, domain: str, given: object, metrics: Mapping[str, Metric] = NONE, classes: int = 0
) -> list[Evaluation]:
    """As a site sent them: at most one of each split and kind of statistics."""
    if not isinstance(given, list) or len(given) > len(SPLITS) * len(STATISTICS["all"]):
        raise BadMessage("its evaluations are not a list, or too many")
    found = [evaluation_of(client, domain, entry, metrics, classes) for entry in given]
    if len({(evaluation.split, evaluation.statistics) for evaluation in found}) < len(found):
        raise BadMessage("it evaluated the same images twice")
    return found


def evaluation_of(client: str, domain: str, given: object, metrics: Mapping[str, Metric], classes: int) -> Evaluation:
    """An evaluation as a site sent it; whose it is, the server knows better.

    A model that diverged has no loss there, and still so many images that it takes for the right class.
    """
    if not isinstance(given, dict):
        raise BadMessage("an evaluation of it is not a table")
    values: list[Any] = [given.get(name) for name in ("split", "statistics", "correct", "samples", "loss_sum")]
    split, kind, correct, samples, loss = values
    if split not in SPLITS or kind not in STATISTICS["all"]:
        raise BadMessage(f"an evaluation of it is of {shown(split)} with {shown(kind)} statistics")
    if not is_whole(correct) or not is_whole(samples) or not 0 <= correct <= samples < MOST_SAMPLES or samples == 0:
        raise BadMessage(f"an evaluation of it has {shown(correct)} right of {shown(samples)}")
    most = LARGEST_LOSS * samples
    if loss is None or (isinstance(loss, float) and not loss <= most):
        loss = math.nan
    elif isinstance(loss, bool) or not isinstance(loss, (int, float)) or not 0 <= loss <= most:
        raise BadMessage(f"an evaluation of it has the loss {shown(loss)}")
    sums = numbers_of(given.get("metric_sums", {}), {n for n, metric in metrics.items() if metric.per_sample}, most)
    whole = numbers_of(given.get("values", {}), {n for n, metric in metrics.items() if not metric.per_sample}, most)
    found = Evaluation(client, domain, str(split), str(kind), correct, samples, float(loss), sums, whole)
    return replace(found, details=details_of(given.get("details"), found, {*ALWAYS, *metrics}, classes))


def numbers_of(given: object, names: Collection[str], most: float) -> dict[str, float]:
    """Numbers by these names; what is not finite, or too large to be one, is not known."""
    if not isinstance(given, dict) or given.keys() != set(names):
        raise BadMessage(f"an evaluation of it has the metrics {shown(given)}")
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise BadMessage(f"an evaluation of it has {shown(value)} as '{name}'")
    return {name: value if value is not None and abs(value) <= most else math.nan for name, value in given.items()}


def details_of(given: object, of: Evaluation, names: Collection[str], classes: int) -> dict[str, Any] | None:
    """What a site tells of its test set, if it does: the cells of a confusion matrix, and measures."""
    if given is None:
        return None
    if not isinstance(given, dict) or given.keys() != {"confusion", "measures"}:
        raise BadMessage(f"an evaluation of it has the details {shown(given)}")
    cells, told = given["confusion"], given["measures"]
    if not isinstance(cells, list) or len(cells) > of.samples or not all(_is_cell(cell, classes) for cell in cells):
        raise BadMessage(f"an evaluation of it has the confusion matrix {shown(cells)}")
    right = sum(images for true, said, images in cells if true == said)
    if (sum(images for *_, images in cells), right) != (of.samples, of.correct):
        raise BadMessage("its confusion matrix is of other images than it counts")
    if not isinstance(told, dict) or not told.keys() <= set(names):
        raise BadMessage(f"an evaluation of it has the measures {shown(told)}")
    measures = {name: Measure.of(one) for name, one in told.items()}
    for name, one in measures.items():
        if len(one.classes) not in (0, classes) or any(part.classes for part in one.classes):
            raise BadMessage(f"its measure '{name}' is of {len(one.classes)} classes")
    return {"confusion": cells, "measures": {name: one.to_list() for name, one in measures.items()}}


def _is_cell(given: object, classes: int) -> bool:
    """A true class, the class it is taken for, and how many images are."""
    if not isinstance(given, list) or len(given) != 3 or not all(map(is_whole, given)):
        return False
    return bool(0 <= given[0] < classes and 0 <= given[1] < classes and given[2] > 0)
