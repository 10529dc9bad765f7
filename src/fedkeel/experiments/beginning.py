"""What a comparison's runs would begin with now, and what becomes of those that began with something else."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedkeel.data.outline import Outline, changed
from fedkeel.experiments.jobs import Job
from fedkeel.files import explained
from fedkeel.runs.origin import Origin, read_outline
from fedkeel.runs.store import Store, numbered

ASIDE = re.compile(r"seed\d+-before(-\d+)?")  # names of what was put aside


class Beginning(NamedTuple):
    """What a method would begin with now: its code, its network, and the data, divided by that seed."""

    origin: Origin
    outline: Outline
    seed: int

    def differs(self, job: Job) -> str:
        """What of it is not as when the run of this job began, as the end of a sentence, or nothing."""
        before, outline = Origin.load(job.directory), read_outline(job.directory)
        if outline is not None and (what := changed(outline, self.outline, divided=job.seed == self.seed)):
            return f"its data have changed: {what}"
        if before is None:
            return ""
        if what := before.changed_code(self.origin.code):
            return f"the code of {what} has changed since then"
        weights = [origin.given.get("model", {}).get("weights") for origin in (before, self.origin)]
        other = all(weights) and weights[0] != weights[1]
        return "its network began with other weights (torch.manual_seed before it is made keeps them)" if other else ""


def put_outdated_aside(jobs: Sequence[Job], now: Mapping[str, Beginning], note: Callable[[str], None]) -> None:
    """A run of other code or other data must not stand in a table as one of these, nor go on as one."""
    versions: set[str] = set()
    for job in jobs:
        if what := now[job.label].differs(job):
            note(f"'{job.directory}' is trained anew, since {what}; what it was is now '{put_aside(job.directory)}'.")
        elif before := Origin.load(job.directory):
            versions.add(before.fedkeel)
    if others := sorted(versions - {beginning.origin.fedkeel for beginning in now.values()}):
        note(f"Runs that are used again were made by fedkeel {', '.join(others)}: their results may differ.")


def put_aside(directory: Path) -> Path:
    """Give a run directory a name beside its own: `seed0-before`, `seed0-before-2`, ..."""
    names = (directory.with_name(path.name) for path in numbered(f"{directory.name}-before"))
    aside = next(path for path in names if not path.exists())
    store = Store.open(directory)  # refused while somebody is at work there
    try:
        with explained(directory):
            os.rename(directory, aside)
    finally:
        store.close()
    return aside
