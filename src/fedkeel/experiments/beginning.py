"""What a comparison's runs would begin with now."""

from __future__ import annotations

from typing import NamedTuple

from fedkeel.data.outline import Outline, changed
from fedkeel.experiments.jobs import Job
from fedkeel.runs.origin import Origin, read_outline


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
