"""Runs of a comparison, made up or very small, and who is told of them."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from fedkeel.config import Config
from fedkeel.experiments.jobs import Job, JobsObserver

TINY: dict[str, Any] = {
    "rounds": 1,
    "subsample": 10,
    "model": "simple_cnn(width=2)",
    "evaluate_every": 9,
    "device": "cpu",
}


def finish(directory: Path, config: Config, accuracies: dict[str, float], unseen: tuple[str, ...] = ()) -> None:
    """A finished run, by hand."""
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(config.to_toml())
    seen = [value for name, value in accuracies.items() if name not in unseen]
    summary = {
        "result": config.result,
        "round": config.rounds - 1,
        "accuracy": statistics.fmean(seen),
        "samples_accuracy": statistics.fmean(seen),
        "domains": accuracies,
        "unseen_domains": list(unseen),
        "unseen": statistics.fmean(accuracies[name] for name in unseen) if unseen else None,
        "seconds": 1.0,
        "bytes_up": 10,
        "bytes_down": 10,
        "executor": "serial",
    }
    (directory / "summary.json").write_text(json.dumps(summary))


class Watching(JobsObserver):
    def __init__(self) -> None:
        self.started: list[str] = []
        self.problems: dict[str, str] = {}
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def job_started(self, job: Job, first_round: int) -> None:
        self.started.append(f"{job} from {first_round}")

    def job_finished(self, job: Job, problem: str) -> None:
        self.problems[str(job)] = problem
