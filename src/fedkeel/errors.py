"""Errors that a person can act on.

Every error that Fedkeel raises on purpose is a `FedkeelError`. Its message is one sentence that says what
was given, what was expected and what to do next; the command line prints it as it is and exits with 2.
"""

import errno
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher, get_close_matches


class FedkeelError(ValueError):
    """Something the user gave cannot work; the message says what to change.

    The classes of these errors are `MethodError`, `DataError`, `StoreError`, `TrainingError` and `ShortageError`.

    >>> from fedkeel import methods
    >>> methods.build("fedprxo")
    Traceback (most recent call last):
    fedkeel.errors.FedkeelError: There is no method named 'fedprxo': did you mean 'fedprox'?
    """


class MethodError(FedkeelError):
    """A method cannot act on this model, or two parts of a composition contradict each other."""


class DataError(FedkeelError):
    """A data set cannot be read or cut into clients as asked."""


class StoreError(FedkeelError):
    """A run directory cannot be written or read."""


class TrainingError(FedkeelError):
    """A run cannot go on, e.g. because every client's update was dropped."""


class ShortageError(FedkeelError):
    """There is too little memory."""


def nearest(given: str, choices: Iterable[str], otherwise: str | None = None) -> str:
    """The end of an error sentence: the nearest valid choice, several where they are equally near. When none is near,
    all of them; or, where these are too many to help, `otherwise`.

    >>> nearest("fedbm", ["fedavg", "fedbn", "fedfm"])
    "did you mean 'fedbn' or 'fedfm'?"
    """
    choices, word = sorted(set(choices)), str(given).lower()
    in_lower_case = {choice.lower(): choice for choice in choices}
    short = otherwise is None and len(word) < 4  # of which half may be one letter
    close = get_close_matches(word, in_lower_case, n=5, cutoff=0.5 if short else 0.6)
    if close:
        # Each compared the way round in which `get_close_matches` does it: the two ways can differ.
        near = {name: SequenceMatcher(None, name, word).ratio() for name in close}
        equal = sorted(f"'{in_lower_case[name]}'" for name in close if near[name] > near[close[0]] - 1e-9)
        return f"did you mean {' or '.join(equal)}?"
    if otherwise is not None:
        return otherwise
    return f"choose from {', '.join(choices)}." if choices else "there is nothing to choose from."


def unknown(kind: str, given: str, choices: Iterable[str]) -> str:
    """One sentence for a name that does not exist."""
    return f"There is no {kind} named '{given}': {nearest(given, choices)}"


def quoted(names: Sequence[str], most: int = 8, more: str = "{:,} more") -> str:
    """Names for a sentence; of very many the first, and that there are more.

    >>> quoted(["scan", "paper"]), quoted(["scan", "paper"], 1)
    ("'scan', 'paper'", "'scan' and 1 more")
    """
    rest = len(names) - most
    return ", ".join(f"'{name}'" for name in names[:most]) + (f" and {more.format(rest)}" if rest > 0 else "")


def numbered(what: str, numbers: Sequence[int], most: int = 8) -> str:
    """Numbers of `what` for a sentence; of very many the first, and that there are more.

    >>> numbered("Row", [3]), numbered("Row", [3, 5, 9], 2)
    ('Row 3', 'Rows 3, 5 and 1 more')
    """
    shown = ", ".join(map(str, numbers[:most])) + (f" and {len(numbers) - most:,} more" if len(numbers) > most else "")
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}"


def first_line(error: BaseException) -> str:
    """What somebody else's error says, for a sentence of ours, which ends it.

    >>> first_line(ValueError("no such layer.\\nTraceback ...")), first_line(KeyError())
    ('no such layer', 'KeyError')
    """
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


# -- too little memory: what ran out, and what needs less of it --------------------------------------------------
IN_MEMORY = (
    "The memory of this machine does not suffice{amount}: give fewer --workers or --jobs, a smaller --batch-size or "
    "--evaluation-batch, a smaller model or fewer or smaller images, or stop what else runs here."
)
ON_GPU = (
    "The memory of the GPU does not suffice{amount}: give a smaller --batch-size or --evaluation-batch, a smaller "
    "model, fewer clients at once with --workers or fewer --jobs, or stop what else runs on it."
)
# As torch, its libraries and C++ put it; only some of these have a type of their own.
_OF_THE_GPU = re.compile(r"CUDA.*out of memory|CU[A-Z]+_STATUS_ALLOC_FAILED", re.IGNORECASE | re.DOTALL)
_OF_THE_MACHINE = re.compile(
    r"(can.?t|cannot|unable to|failed to) allocate|not enough memory|bad_alloc|can.?t start new thread", re.IGNORECASE
)
_AMOUNT = re.compile(r"(?:allocate|needs) ([\d.]+ ?(?:bytes|[KMGT]i?B))", re.IGNORECASE)


def shortage(error: BaseException) -> str:
    """One sentence, if it is memory that was missing; else nothing."""
    text = str(error)
    found = _AMOUNT.search(text)
    amount = f" for another {_readable(found[1])}" if found else ""
    if isinstance(error, RuntimeError) and (type(error).__name__ == "OutOfMemoryError" or _OF_THE_GPU.search(text)):
        return ON_GPU.format(amount=amount)
    is_meant = isinstance(error, RuntimeError) and _OF_THE_MACHINE.search(text)
    if isinstance(error, MemoryError) or is_meant or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return IN_MEMORY.format(amount=amount)
    return ""


@contextmanager
def shortages_explained() -> Iterator[None]:
    """Inside, an error that comes from a lack of memory becomes that sentence."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        sentence = shortage(error)
        if not sentence:
            raise
        raise ShortageError(sentence) from error


def death(code: int | None, fewer: str) -> str:
    """What became of a process, by its exit code; `fewer` is the option that would have left it more memory."""
    if code is None or code >= 0:
        return f"died (exit code {code})"
    name = signal.Signals(-code).name
    # The system ends with the first whoever takes too much, and with the second whoever uses what it could not give.
    hint = f", as when memory runs out: give fewer {fewer}" if name in ("SIGKILL", "SIGBUS") else ""
    return f"died (signal {name}){hint}"


def _readable(amount: str) -> str:
    number, unit = amount.split(" ", 1) if " " in amount else (amount, "")
    if unit.lower() != "bytes":
        return amount
    size = float(number)
    return next((f"{size / n:.1f} {name}" for n, name in ((2**30, "GiB"), (2**20, "MiB")) if size >= n), amount)
