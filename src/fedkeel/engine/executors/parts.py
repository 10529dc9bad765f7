"""What executors share whose clients run in other processes: evaluations in parts, and replies as bytes."""

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from fedkeel.core.evaluation import Evaluation, Outputs, merged
from fedkeel.core.messages import Answer, Missing, Update, pack, unpack
from fedkeel.core.state import Tensors
from fedkeel.engine.evaluation import split_indices
from fedkeel.engine.local import Worker
from fedkeel.engine.tasks import LostMemory, Remembered, Result, Task, fetched
from fedkeel.errors import FedkeelError, ShortageError, shortage
from fedkeel.stopping import Stopped

PART = 4  # batches of an evaluation that one worker does at a time
Header = dict[str, Any]
Run = Callable[[Sequence[Task]], Iterator[tuple[int, Result[Any] | Missing]]]  # results with the places of their tasks


# -- parts of an evaluation ------------------------------------------------------------------------------------------
def in_parts(tasks: Iterable[Task], worker: Worker, run: Run) -> Iterator[Result[Any] | Missing]:
    """Run tasks, those of clients with the most samples first, so that none of them is waited for at the end; and
    evaluations in parts, whose results are put together again."""
    longest_first = sorted(tasks, key=lambda task: -worker.federation[task.client].samples)
    parts = [(whole, part) for whole, task in enumerate(longest_first) for part in parts_of(worker, task)]
    evaluated: dict[int, dict[int, list[Evaluation]]] = {}
    for place, result in run([part for _, part in parts]):
        whole, task = parts[place]
        if isinstance(result, Missing) or task.part is None:
            yield result
            continue
        found = evaluated.setdefault(whole, {})
        found[place] = result.outcome
        if len(found) == sum(one == whole for one, _ in parts):
            yield Result(task.client, merged(one for place in sorted(found) for one in found[place]))


def parts_of(worker: Worker, task: Task) -> list[Task]:
    """A test set that all clients share is one client's: its parts keep every worker busy. They are whole batches, as
    many whatever the number of workers, so that the result does not depend on it."""
    if task.do != "evaluate" or "site" in worker.config.statistics:
        return [task]
    at_once, site = PART * worker.config.evaluation_batch, worker.federation[task.client]
    starts = range(0, max([len(split_indices(site, split)) for split in task.splits] + [1]), at_once)
    return [replace(task, part=slice(start, start + at_once)) for start in starts]


# -- replies ---------------------------------------------------------------------------------------------------------
class Reply(NamedTuple):
    """What another process sends back: a packed result, or why there is none."""

    packed: bytes = b""
    seconds: float | None = None
    missing: str = ""  # this client has nothing to offer
    mistake: str = ""  # a sentence that ends the run here as it would in one process
    error: str = ""  # a traceback that does
    lacking: str = ""  # memory
    lost: str = ""  # what the client remembered


def reply_of(task: Task, result: Result[Any] | Missing) -> tuple[Reply, bytes]:
    """A result as a reply, and as bytes of its own what the client remembers."""
    if isinstance(result, Missing):
        return Reply(missing=result.reason), b""
    if task.do == "evaluate":
        tables, outputs = evaluations_to(result.outcome)
        return Reply(pack({"evaluations": tables}, **outputs)), b""
    memory = pack({}, memory=fetched(result.memory))
    return Reply(pack(result.outcome.header, **result.outcome.groups), result.seconds), memory


def told(error: Exception) -> tuple[Reply, bytes]:
    """What went wrong, in words: not every exception survives a way between processes."""
    if isinstance(error, Stopped):
        return Reply(missing="it was stopped"), b""  # nobody looks at it
    if isinstance(error, LostMemory):
        return Reply(lost=str(error)), b""
    if isinstance(error, FedkeelError):
        return Reply(mistake=str(error)), b""
    lack = shortage(error)
    return (Reply(lacking=lack) if lack else Reply(error="".join(traceback.format_exception(error)))), b""


def read(task: Task, reply: Reply, memory: Remembered) -> Result[Any] | Missing:
    """A reply as what came of the task; what ends a run in one process ends it here too."""
    if reply.missing:
        return Missing(task.client, reply.missing)
    if reply.lacking:
        raise ShortageError(reply.lacking)
    if reply.lost:
        raise LostMemory(reply.lost)
    if reply.mistake:
        raise FedkeelError(reply.mistake)
    if reply.error:
        raise RuntimeError(f"Client '{task.client}' failed in its worker process:\n{reply.error}")
    header, groups = unpack(reply.packed)
    if task.do == "evaluate":
        return Result(task.client, evaluations_from(header["evaluations"], groups))
    kind = Update if task.do == "train" else Answer
    return Result(task.client, kind.of(header, groups), memory, reply.seconds)


def evaluations_to(found: Sequence[Evaluation]) -> tuple[list[Header], dict[str, Tensors]]:
    """A table of each, and the tensors of those with outputs."""
    outputs = {f"{n}": one.outputs._asdict() for n, one in enumerate(found) if one.outputs is not None}
    return [asdict(replace(one, outputs=None)) for one in found], outputs


def evaluations_from(tables: Sequence[Header], groups: dict[str, Tensors]) -> list[Evaluation]:
    return [
        replace(Evaluation(**table), outputs=Outputs(**groups[f"{n}"]) if f"{n}" in groups else None)
        for n, table in enumerate(tables)
    ]
