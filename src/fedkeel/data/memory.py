"""How much memory there is, and a sentence before it runs out.

Linux gives memory that it does not have and ends the process that uses it, without a word. So what will be held is
computed first.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedkeel.errors import DataError

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def require(needed: int, what: str, advice: str) -> None:
    """Refuse `what` in a sentence if it needs more bytes than there are; `advice` says what to do instead."""
    there = available()
    if there is not None and needed > there:
        raise DataError(f"{what} need {size(needed)} of memory, and {size(there)} are free: {advice}.")


@contextmanager
def holding(needed: int, what: str, advice: str) -> Iterator[None]:
    """The same, before and while it is held: memory may be refused all the same."""
    require(needed, what, advice)
    try:
        yield
    except MemoryError as error:
        raise DataError(f"{what} need more memory than there is: {advice}.") from error


def available(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes that this process can still take, of the machine's and of its container's; None where nothing says so."""
    found = list(_of_groups(proc, cgroups))
    if kilobytes := _entry(proc / "meminfo", "MemAvailable:"):
        found.append(1024 * kilobytes)
    else:
        with suppress(OSError, ValueError, AttributeError):  # other systems say at least how much there is in all
            found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(found)) if found else None


def size(count: float) -> str:
    """
    >>> size(7_500_000_000)
    '7.5 GB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def _of_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """What is left of each limit of the control groups that this process is in, version 2 or 1; each binds alone."""
    lines: list[str] = []
    with suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    for line in lines:
        _, kinds, own = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root = cgroups / "memory" if kinds else cgroups
        files = ("memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else ("memory.max", "memory.current")
        group = root / own.strip("/")
        # In a container the path is the host's and not there, and the top is the container's own group.
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            with suppress(OSError, ValueError):  # no such file, or no limit: "max"
                limit, used = (int((folder / file).read_text()) for file in files)
                # The kernel gives files that it keeps back as soon as somebody needs the memory.
                stat = folder / "memory.stat"
                kept = [_entry(stat, f"{kind}_file", f"total_{kind}_file") for kind in ("inactive", "active")]
                yield limit - used + sum(kept)


def _entry(file: Path, *names: str) -> int:
    """The number in the first line that begins with one of the names."""
    with suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            name, value, *_ = line.split()
            if name in names:
                return int(value)
    return 0
