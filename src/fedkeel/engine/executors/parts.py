"""What executors share whose clients run in other processes: evaluations in parts, a second try, and what travels."""

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fedkeel.core.evaluation import Evaluation, merged
from fedkeel.core.messages import Answer, Message, Missing, Update, pack, unpack
from fedkeel.core.state import Tensors
from fedkeel.engine.evaluation import split_indices
from fedkeel.engine.local import Worker
from fedkeel.engine.tasks import LostMemory, Remembered, Result, Task, fetched
from fedkeel.errors import FedkeelError, ShortageError, TrainingError, shortage
from fedkeel.stopping import Stopped

PART = 4  # batches of an evaluation that one worker does at a time
Attempt = Callable[[Mapping[int, Task], bool], Iterator[tuple[int, Result[Any] | Missing | None]]]
"""Does these tasks, each alone in its process if so asked: results with the tasks' numbers, None where it died."""


def results(tasks: Sequence[Task], worker: Worker, attempt: Attempt, died: str) -> Iterator[Result[Any] | Missing]:
    """Do tasks, those of clients with the most samples first, so that none of them is waited for at the end, and
    evaluations in parts. What was under way in a process that died is done once more, alone: what ends that one too is
    missing, with its name."""
    longest_first = sorted(tasks, key=lambda task: -worker.federation[task.client].samples)
    parts = list(enumerate(part for task in longest_first for part in parts_of(worker, task)))
    left, evaluated = dict(parts), dict[int, list[Evaluation]]()
    for alone in (False, True):
        for number, result in attempt(dict(left), alone):
            if result is None:
                continue
            task = left.pop(number)
            if isinstance(result, Missing) or task.part is None:
                yield result
            else:
                evaluated[number] = result.outcome
    for task in left.values():
        if task.do == "evaluate":  # a number that is missing is no result
            raise TrainingError(f"The evaluation of '{task.client}' failed, because {died}.")
        yield Missing(task.client, died)
    by_client: dict[str, list[Evaluation]] = {}
    for number, task in parts:
        by_client.setdefault(task.client, []).extend(evaluated.get(number, ()))
    yield from (Result(client, merged(found)) for client, found in by_client.items() if found)


def parts_of(worker: Worker, task: Task) -> list[Task]:
    """A test set that all clients share is one client's: its parts keep every worker busy. They are whole batches, as
    many whatever the number of workers, so that the result does not depend on it."""
    if task.do != "evaluate" or "site" in worker.config.statistics:
        return [task]
    at_once, site = PART * worker.config.evaluation_batch, worker.federation[task.client]
    starts = range(0, max([len(split_indices(site, split)) for split in task.splits] + [1]), at_once)
    return [replace(task, part=slice(start, start + at_once)) for start in starts]


# -- what travels ------------------------------------------------------------------------------------------------------
def packed(result: Result[Any] | Missing) -> tuple[Result[Any] | Missing, bytes]:
    """An update or an answer as the bytes that it is over a network, evaluations as they are; and what the client
    remembers beside it."""
    if isinstance(result, Missing):
        return result, b""
    if isinstance(result.outcome, Message):
        outcome = pack(result.outcome.header, **result.outcome.groups)
        return Result(result.client, outcome, seconds=result.seconds), memory_to_bytes(result.memory)
    return Result(result.client, result.outcome), b""


def unpacked(task: Task, result: Result[Any] | Missing, memory: Remembered) -> Result[Any] | Missing:
    if isinstance(result, Missing) or task.do == "evaluate":
        return result
    kind = Update if task.do == "train" else Answer
    return Result(task.client, kind.of(*unpack(result.outcome)), memory, result.seconds)


def memory_to_bytes(memory: Remembered) -> bytes:
    return pack({}, memory=fetched(memory))


def memory_from_bytes(packed: bytes) -> Tensors:
    return unpack(packed)[1].get("memory", {}) if packed else {}


@contextmanager
def explained(client: Callable[[], str]) -> Iterator[None]:
    """In another process: not every error survives the way from there, so a bug comes as the text of its traceback."""
    try:
        yield
    except (LostMemory, Stopped):
        raise
    except FedkeelError as error:
        raise FedkeelError(str(error)) from None
    except Exception as error:
        if lack := shortage(error):
            raise ShortageError(lack) from None
        text = "".join(traceback.format_exception(error))
        raise RuntimeError(f"Client '{client()}' failed in its worker process:\n{text}") from None
