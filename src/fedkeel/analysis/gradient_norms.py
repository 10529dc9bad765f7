"""Gradient norms by round, around the round of calibration (FedCoda, Figure 4).

The paper plots "gradient norms over communication rounds" and leaves open of what, and when. Here it is the L2 norm
of all gradients of a local step together, averaged over the steps of a client and then over the clients of the round:
as computed, before the method and the clipping touch them, and as the optimiser takes them. The largest of a round is
there too: a jump at the switch of statistics lasts for a few steps only.

The norms are taken in every local step, on the device, and read at the end of a client's recorded rounds. Figure 4
needs every round: `record_every = 1`.

After a run the local steps are gone, and with them what the method adds. Then it is the gradient of the cross-entropy
at the models that the run has kept, its last checkpoints and its end, over each client's training images in batches of
`batch_size`: the norm averaged over batches and then over clients, under the statistics of the batch and under the
global ones. How far these two lie apart is the jump that a switch of statistics makes at that model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.analysis.diagnostic import Diagnostic, Measured, Values, diagnostic
from fedkeel.analysis.figures import Figure, bars, by_round, keyed
from fedkeel.analysis.moment import Moment, Objects, all_of_run
from fedkeel.config import from_one
from fedkeel.core.state import batch_norms
from fedkeel.engine.local import WATCHED, StepWatch
from fedkeel.errors import FedkeelError
from fedkeel.nn.surgery import batch_statistics
from fedkeel.runs.run import Run

COMPUTED, USED, LARGEST = "gradient_norm", "used_gradient_norm", "largest_gradient_norm"
BATCH, GLOBAL, NO_NORM = "under batch statistics", "under global statistics", "at the model"


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


def at_rest(moment: Moment) -> dict[str, dict[str, float]]:
    """By kind of statistics and client: the mean norm over the batches of the client's training images."""
    worker = moment.worker
    model, parameters = worker.model.eval(), list(worker.model.parameters())
    kinds = (BATCH, GLOBAL) if batch_norms(model) else (NO_NORM,)
    found: dict[str, dict[str, float]] = {kind: {} for kind in kinds}
    for client in moment.clients:
        moment.put_local(client)
        for kind in kinds:
            norms = []
            for batch in moment.batches(client, client.train, worker.config.batch_size):
                model.zero_grad(set_to_none=True)
                with batch_statistics(model) if kind == BATCH and len(batch.y) > 1 else nullcontext():
                    F.cross_entropy(model(batch.x).logits, batch.y).backward()  # type: ignore[no-untyped-call]
                norms.append(float(gradient_norm(parameters)))
            found[kind][client.name] = float(np.mean(norms))
    model.zero_grad(set_to_none=True)
    return found


def figures_at_rest(measured: Sequence[Measured], switch: str) -> list[Figure]:
    rounds = [from_one(entry.round) for entry in measured]
    kept = f"round{'s' if len(rounds) > 1 else ''} {', '.join(map(str, rounds))}"
    points = "one point" if len(rounds) == 1 else f"{len(rounds)} points"
    note = (
        f"Made after the run, which has kept the model of {kept}: {points}. For a curve over the rounds, and for what "
        f"the method and its clipping do, run with --record gradient-norms. {switch}"
    ).strip()
    last = measured[-1]
    tables = {entry.round: entry.values["at rest"] for entry in measured}
    means = {r: {kind: float(np.mean(list(by.values()))) for kind, by in t.items()} for r, t in tables.items()}
    by_client = {kind: list(by.values()) for kind, by in tables[last.round].items()}
    clients = list(next(iter(tables[last.round].values())))
    return [
        by_round("Of the models that were kept, mean over the clients", "gradient norm", means, note=note),
        bars(f"By client, round {from_one(last.round)}", "gradient norm", clients, by_client, x_label="client"),
    ]


@diagnostic("gradient-norms")
class GradientNormsByRound(Diagnostic):
    """Norms of the gradients of local training, as computed and as used."""

    title = "Gradient norms"
    what = (
        "Recorded in training: the norm of all gradients of a local step, averaged over steps and clients, as computed "
        "and as the optimiser takes them after the method's clipping; where a method switches batch norm to global "
        "statistics they jump. Made after a run: the same at the models it kept, without steps, under batch and under "
        "global statistics."
    )
    paper = "FedCoda, Figure 4"

    def watch(self, is_recorded: Callable[[int], bool]) -> Callable[[nn.Module], StepWatch]:
        return lambda model: GradientNorms(model, is_recorded)

    def moments(self, run: Run, objects: Objects) -> list[Moment]:
        return all_of_run(run, objects)

    def measure(self, moment: Moment) -> Values:
        if not moment.updates:
            return {"at rest": at_rest(moment), "switch": switch_round(moment)}
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
        text = "" if switch is None else f"Batch norm switches to global statistics in round {from_one(switch)}."
        if "at rest" in measured[-1].values:
            return figures_at_rest(measured, text)
        note = {"note": text} if text else {}
        all_clients = {
            entry.round: {
                "as computed": mean(entry.values["computed"]),
                "as used": mean(entry.values["used"]),
                "largest of a step": max(entry.values["largest"].values(), default=None),
            }
            for entry in measured
        }
        by_client = {entry.round: entry.values["computed"] for entry in measured}
        figures = [
            by_round("Over the clients of a round", "gradient norm", all_clients, **note),
            by_round("By client, as computed", "gradient norm", by_client, **note),
        ]
        return keyed(figures, "gradient norm in training", mean(measured[-1].values["computed"]))
