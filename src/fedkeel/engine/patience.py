"""Early stopping: whether the validation still gets better."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Patience:
    """Over after so many `evaluations` in a row in which the best was not beaten by more than `least`; 0 is never."""

    evaluations: int
    least: float
    waited: int = 0
    reference: float | None = None  # what there is to beat

    def see(self, best: Mapping[str, float]) -> None:
        """An evaluation is over; `best` is the best until now, the higher the better."""
        if best["round"] < 0:  # no client has told yet
            return
        if self.reference is None or best["accuracy"] - self.reference > self.least:
            self.waited, self.reference = 0, best["accuracy"]
        else:
            self.waited += 1

    @property
    def is_over(self) -> bool:
        return 0 < self.evaluations <= self.waited

    def kept(self) -> dict[str, float]:
        """For a checkpoint; nothing where nobody asks."""
        return {"waited": self.waited, "reference": self.reference} if self.evaluations and self.reference else {}

    def restore(self, kept: Mapping[str, float]) -> None:
        self.waited, self.reference = int(kept.get("waited", 0)), kept.get("reference")
