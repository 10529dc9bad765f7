"""Errors that a person can act on.

Every error that Fedkeel raises on purpose is a `FedkeelError`. Its message is one sentence that says what
was given, what was expected and what to do next; the command line prints it as it is and exits with 2.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches


class FedkeelError(ValueError):
    """Something the user gave cannot work; the message says what to change."""


class MethodError(FedkeelError):
    """A method cannot act on this model, or two parts of a composition contradict each other."""


class DataError(FedkeelError):
    """A data set cannot be read or cut into clients as asked."""


class StoreError(FedkeelError):
    """A run directory cannot be written or read."""


class TrainingError(FedkeelError):
    """A run cannot go on, e.g. because every client's update was dropped."""


class ShortageError(FedkeelError):
    """There is too little memory, see `fedkeel.shortage`."""


def nearest(given: str, choices: Iterable[str]) -> str:
    """The end of an error sentence: the nearest valid choice, several where they are equally near, or all of them when
    none is.

    >>> nearest("fedbm", ["fedavg", "fedbn", "fedfm"])
    "did you mean 'fedbn' or 'fedfm'?"
    """
    choices, word = sorted(set(choices)), str(given).lower()
    in_lower_case = {choice.lower(): choice for choice in choices}
    close = get_close_matches(word, in_lower_case, n=5, cutoff=0.5)
    if close:
        # Each compared the way round in which `get_close_matches` does it: the two ways can differ.
        near = {name: SequenceMatcher(None, name, word).ratio() for name in close}
        equal = sorted(f"'{in_lower_case[name]}'" for name in close if near[name] > near[close[0]] - 1e-9)
        return f"did you mean {' or '.join(equal)}?"
    return f"choose from {', '.join(choices)}." if choices else "there is nothing to choose from."


def unknown(kind: str, given: str, choices: Iterable[str]) -> str:
    """One sentence for a name that does not exist."""
    return f"There is no {kind} named '{given}': {nearest(given, choices)}"
