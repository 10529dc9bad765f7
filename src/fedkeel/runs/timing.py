"""What each round of a run took: `timing.jsonl`, apart from the metrics, which have no times."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FILE = "timing.jsonl"


def read_timing(directory: Path) -> list[dict[str, Any]]:
    """The `round` of each line, the seconds of its phases and, where they are known, of its `clients`; a line that a
    kill has cut off is left out."""
    path, times = directory / FILE, []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            times.append(json.loads(line))
    return times


def seconds_of(times: Mapping[str, Any]) -> float:
    """What a round took, of a line of `read_timing`."""
    return sum(float(value) for name, value in times.items() if name not in ("round", "clients"))
