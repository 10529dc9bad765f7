"""Early stopping: whether the validation still gets better."""

import math
from collections.abc import Mapping


class Patience:
    """Over after so many evaluations in a row in which the best was not beaten by more than `least`; 0 is never."""

    def __init__(self, evaluations: int, least: float) -> None:
        self.evaluations, self.least = evaluations, least
        self.kept: dict[str, float] = {}  # for checkpoints: what there is to beat, and for how long nothing did

    def see(self, best: Mapping[str, float]) -> None:
        """An evaluation is over; `best` is the best until now, the higher the better."""
        if not self.evaluations or best["round"] < 0:  # no client has told yet
            return
        if best["accuracy"] - self.kept.get("to_beat", -math.inf) > self.least:
            self.kept = {"to_beat": best["accuracy"], "waited": 0}
        else:
            self.kept["waited"] += 1

    def restore(self, kept: Mapping[str, float]) -> None:
        self.kept = {name: kept[name] for name in ("to_beat", "waited") if name in kept}

    @property
    def is_over(self) -> bool:
        return 0 < self.evaluations <= self.kept.get("waited", 0)
