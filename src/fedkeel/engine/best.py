"""The best round so far by the validation data: its model, and for how many evaluations nothing has been better."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedkeel.config import Config
from fedkeel.core.state import Tensors


@dataclass
class Best:
    """What `result = "best-validation"` and `patience` go by.

    Attributes:
        round: which it was; -1 until a client has told.
        value: of what `select_by` names, the higher the better: a loss is turned round.
        to_beat: the value that the next one must exceed by more than `min_delta`.
        waited: evaluations since one did.
        model: of that round, where it is to be the result.
        local: what each client kept of the model then, for methods that keep any.
    """

    config: Config
    round: int = -1
    value: float = -math.inf
    to_beat: float = -math.inf
    waited: int = 0
    model: Tensors = field(default_factory=dict)
    local: dict[str, Tensors] = field(default_factory=dict)

    @property
    def is_result(self) -> bool:
        return self.config.result == "best-validation" and self.round >= 0

    @property
    def is_over(self) -> bool:
        """Whether there were `patience` evaluations in a row without a better one; 0 never is."""
        return 0 < self.config.patience <= self.waited

    def see(self, round: int, value: float) -> bool:
        """An evaluation has this value; whether none before was as good."""
        is_better = value > self.value
        if is_better:
            self.round, self.value = round, value
        return is_better

    def count(self) -> None:
        """An evaluation is over, whether or not a client has told how good it was."""
        if self.round < 0:
            return
        if self.value - self.to_beat > self.config.min_delta:
            self.to_beat, self.waited = self.value, 0
        else:
            self.waited += 1

    # -- in checkpoints --------------------------------------------------------------------------------------
    def numbers(self) -> dict[str, float]:
        if self.round < 0:
            return {}
        return {"round": self.round, "value": self.value, "to_beat": self.to_beat, "waited": self.waited}

    def groups(self) -> dict[str, Tensors]:
        local = {f"{client}/{name}": tensor for client, kept in self.local.items() for name, tensor in kept.items()}
        return {"best": self.model, "best_local": local}

    def restore(self, numbers: Mapping[str, float], groups: Mapping[str, Tensors]) -> None:
        vars(self).update(numbers)
        self.model = groups.get("best", {})
        for name, tensor in groups.get("best_local", {}).items():
            client, _, entry = name.rpartition("/")
            self.local.setdefault(client, {})[entry] = tensor
