"""What each round of a run took: `timing.jsonl`, apart from the metrics, which have no times."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedkeel.files import parsed
from fedkeel.runs.intact import Files
from fedkeel.runs.store import TIMING

FILE = TIMING


def read_timing(directory: Path) -> list[dict[str, Any]]:
    """The `round` of each line, the seconds of its phases and, where they are known, of its `clients`; a line that a
    kill has cut off is left out."""
    if not (directory / FILE).exists():
        return []
    files, times = Files(directory), []
    for line in files.intact(FILE).splitlines():
        found = None
        with suppress(ValueError):
            found = parsed(line)
        if found is not None and not _are_seconds(found):
            raise files.changed(FILE, f"line {line.decode()[:60]!r} has no seconds")
        times += [found] if found is not None else []
    return times


def _are_seconds(times: Any) -> bool:
    if not isinstance(times, dict) or type(times.get("round")) is not int:
        return False
    clients = times.get("clients", {})
    values = [value for name, value in times.items() if name != "clients"]
    return isinstance(clients, dict) and all(type(value) in (int, float) for value in (*values, *clients.values()))


def seconds_of(times: Mapping[str, Any]) -> float:
    """What a round took, of a line of `read_timing`."""
    return sum(float(value) for name, value in times.items() if name not in ("round", "clients"))
