"""Errors that a person can act on.

Every error that Fedkeel raises on purpose is a `FedkeelError`. Its message is one sentence that says what
was given, what was expected and what to do next; the command line prints it as it is and exits with 2.
"""

import errno
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches

# What other tools call options, for those who type it here.
ELSEWHERE = {"lr": "learning_rate", "wd": "weight_decay", "bs": "batch_size", "epochs": "local_epochs"}


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
    """The end of an error sentence: the nearest valid choice. When none is near, all of them; or, where these are too
    many to help, `otherwise`.

    >>> nearest("fedprxo", ["fedavg", "fedprox"]), nearest("mine", ["fedavg", "fedprox"])
    ("did you mean 'fedprox'?", 'choose from fedavg, fedprox.')
    """
    choices, given = sorted(set(choices)), ELSEWHERE.get(given, given)
    cutoff = 0.5 if otherwise is None and len(given) < 4 else 0.6  # of a short name half may be one letter
    if close := get_close_matches(given, choices, n=1, cutoff=cutoff):
        return f"did you mean '{close[0]}'?"
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


# -- too little memory, as torch, its libraries and C++ put it --------------------------------------------------------
_SHORTAGE = re.compile(
    r"out of memory|(can.?t|cannot|unable to|failed to) allocate|not enough memory|bad_alloc|alloc_failed|new thread",
    re.IGNORECASE,
)


def shortage(error: BaseException) -> str:
    """One sentence, if it is memory that was missing; else nothing."""
    known = isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN)
    )
    if not known and not (isinstance(error, RuntimeError) and _SHORTAGE.search(str(error))):
        return ""
    return (
        "The memory of this machine does not suffice, or that of its GPU: give fewer --workers or --jobs, a smaller "
        "--batch-size or --evaluation-batch, a smaller model or fewer or smaller images, or stop what else runs here."
    )


@contextmanager
def shortages_explained() -> Iterator[None]:
    """Inside, an error that comes from a lack of memory becomes that sentence."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if sentence := shortage(error):
            raise ShortageError(sentence) from error
        raise


def death(code: int | None, fewer: str) -> str:
    """What became of a process, by its exit code; `fewer` is the option that would have left it more memory."""
    if code is None or code >= 0:
        return f"died (exit code {code})"
    # The system ends with SIGKILL whoever takes too much, and with SIGBUS whoever uses what it could not give.
    name = signal.Signals(-code).name
    hint = f", as when memory runs out: give fewer {fewer}" if name in ("SIGKILL", "SIGBUS") else ""
    return f"died (signal {name}){hint}"
