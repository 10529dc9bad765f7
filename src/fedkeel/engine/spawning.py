"""Processes that are not forked: each imports the main script anew, before it begins with what it is for."""

import multiprocessing
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAME = "fedkeel job"
UNGUARDED = 83  # exit code of a process whose main script would start everything once more
SENTENCE = (
    "Runs that share a GPU are processes of their own, and each imports your script again: put the call under "
    "'if __name__ == \"__main__\":', or give jobs=1."
)


def leave_if_imported_again() -> None:
    """Called where runs begin: in a job that is still importing the main script, this is the script's unguarded call.

    The job leaves without a word; whoever started it sees the exit code and says `SENTENCE` once.
    """
    process = multiprocessing.current_process()
    # Python's own mark of a process that is being set up; the name tells ours from those of the user.
    if process.name.startswith(NAME) and getattr(process, "_inheriting", False):
        raise SystemExit(UNGUARDED)


@contextmanager
def main_that_can_be_imported() -> Iterator[None]:
    """While inside, a main program that came from a pipe has no file, which no process could import."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or getattr(main, "__spec__", None) is not None or Path(file).exists():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file
