"""How good a trial is, from what its run has recorded of its validation samples."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from fedkeel.config import Config
from fedkeel.engine.metrics import chosen, selection
from fedkeel.runs.store import METRICS


def curve(directory: Path, config: Config) -> dict[int, float]:
    """By round how good it was in the validation, the higher the better; of a run under way, what is written."""
    good, found = selection(config), dict[int, float]()
    path = directory / METRICS
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            record = json.loads(line) if b'"scores"' in line else {}
        except ValueError:  # the last, which is still being written
            continue
        # Those that the engine chooses its best round by.
        wanted = {"kind": "scores", "split": "validation", "statistics": config.statistics[0]}
        if wanted.items() <= record.items():
            found[int(record["round"])] = good(record)
    return found


def outcome(values: Sequence[float], rule: str) -> float:
    """What counts of the rounds, by the rule that the result of a run goes by."""
    if rule == "best-validation":
        return max(values)
    return fmean(values[-10:]) if rule == "mean-last-10" else values[-1]


def measured(value: float | None, config: Config) -> float | None:
    """As it was measured, where the lower is the better; nothing where there is no number."""
    if value is None or not math.isfinite(value):
        return None
    lower = config.select_by == "loss" or any(metric.lower for metric in chosen(config).values())
    return -value if lower else value
