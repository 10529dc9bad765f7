"""Gradient norms by round, around the round of calibration (FedCoda, Figure 4).

The paper plots "gradient norms over communication rounds" and leaves open of what, and when. Here it is the L2 norm
of all gradients of a local step together, averaged over the steps of a client and then over the clients of the round:
as computed, before the method and the clipping touch them, and as the optimiser takes them. The largest of a round is
there too: a jump at the switch of statistics lasts for a few steps only.

The norms are taken in every local step, on the device, and read at the end of a client's recorded rounds. Figure 4
needs every round: `record_every = 1`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedkeel.analysis.diagnostic import Diagnostic, Measured, Values, diagnostic
from fedkeel.analysis.figures import Figure, by_round
from fedkeel.analysis.moment import Moment
from fedkeel.engine.local import WATCHED, StepWatch
from fedkeel.errors import FedkeelError

COMPUTED, USED, LARGEST = "gradient_norm", "used_gradient_norm", "largest_gradient_norm"


def gradient_norm(parameters: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all gradients together, in double precision, on their device."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])
    return norms.square().sum().sqrt()


class GradientNorms:
    """Adds up the norms of a client's steps, in tensors that stay where they are, so that steps can be captured."""

    def __init__(self, model: nn.Module, is_recorded: Callable[[int], bool]) -> None:
        self._parameters = list(model.parameters())
        self._is_recorded = is_recorded
        device = self._parameters[0].device
        self._steps, self._computed, self._used, self._largest = (
            torch.zeros((), dtype=torch.float64, device=device) for _ in range(4)
        )

    def begin(self) -> None:
        for total in (self._steps, self._computed, self._used, self._largest):
            total.zero_()

    def computed(self) -> None:
        norm = gradient_norm(self._parameters)
        self._steps += 1
        self._computed += norm
        torch.maximum(self._largest, norm, out=self._largest)

    def used(self) -> None:
        self._used += gradient_norm(self._parameters)

    def metrics(self, round: int) -> dict[str, float]:
        if not self._is_recorded(round):
            return {}
        totals = torch.stack([self._steps, self._computed, self._used, self._largest]).tolist()
        steps, computed, used, largest = totals
        found = {COMPUTED: computed / max(steps, 1), USED: used / max(steps, 1), LARGEST: largest}
        # What is not finite would have the update dropped, which is for the update's own numbers to decide.
        return {name: value for name, value in found.items() if math.isfinite(value)}


def switch_round(moment: Moment) -> int | None:
    """The first round in which a part of the method trains under frozen statistics, if it ever does."""
    rounds = moment.sent.rounds
    for part in moment.worker.method.parts:
        calibrates = getattr(part, "calibrates", None) or getattr(part, "freezes", None)
        if calibrates is not None:
            return next((round for round in range(rounds) if calibrates(round, rounds)), None)
    return None


@diagnostic("gradient-norms")
class GradientNormsByRound(Diagnostic):
    """Norms of the gradients of local training, as computed and as used."""

    title = "Gradient norms of local training"
    what = (
        "The norm of all gradients of a local step, averaged over steps and clients: as computed, and as the optimiser "
        "takes them after the method's clipping. Where a method switches batch norm to global statistics they jump."
    )
    paper = "FedCoda, Figure 4"
    when = "during"

    def watch(self, is_recorded: Callable[[int], bool]) -> Callable[[nn.Module], StepWatch]:
        return lambda model: GradientNorms(model, is_recorded)

    def measure(self, moment: Moment) -> Values:
        names = {"computed": COMPUTED, "used": USED, "largest": LARGEST}
        found = {
            kind: {
                client: update.metrics[f"{WATCHED}{name}"]
                for client, update in moment.updates.items()
                if f"{WATCHED}{name}" in update.metrics
            }
            for kind, name in names.items()
        }
        if not found["computed"]:
            raise FedkeelError("no client told the norms of its gradients.")
        return {**found, "switch": switch_round(moment)}

    def figures(self, measured: Sequence[Measured]) -> list[Figure]:
        def mean(values: dict[str, float]) -> float | None:
            return float(np.mean(list(values.values()))) if values else None

        switch = measured[-1].values["switch"]
        note = {} if switch is None else {"note": f"Batch norm switches to global statistics in round {switch}."}
        all_clients = {
            entry.round: {
                "as computed": mean(entry.values["computed"]),
                "as used": mean(entry.values["used"]),
                "largest of a step": max(entry.values["largest"].values(), default=None),
            }
            for entry in measured
        }
        by_client = {entry.round: entry.values["computed"] for entry in measured}
        return [
            by_round("Over the clients of a round", "gradient norm", all_clients, **note),
            by_round("By client, as computed", "gradient norm", by_client, **note),
        ]
