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

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkeel.analysis import Diagnostic, Measured, Snapshot, Values, diagnostic
from fedkeel.analysis.figures import Figure, bars, by_round, keyed
from fedkeel.config import from_one
from fedkeel.core.state import batch_norms
from fedkeel.data.federation import Client
from fedkeel.engine.local import WATCHED, StepWatch
from fedkeel.errors import FedkeelError
from fedkeel.nn.surgery import batch_statistics

METRICS = {"computed": "gradient_norm", "used": "used_gradient_norm", "largest": "largest_gradient_norm"}
CLIPPING = {"steps": "clipped_steps", "gradients": "clipped_gradients", "bias": "clipping_bias"}  # see `clipping`
BATCH, GLOBAL, NO_NORM = "under batch statistics", "under global statistics", "at the model"


class GradientNorms:
    """Adds up the norms of a client's steps, in tensors that stay where they are, so that steps can be captured."""

    def __init__(self, model: nn.Module, is_recorded: Callable[[int], bool]) -> None:
        self._parameters = list(model.parameters())
        self._is_recorded = is_recorded
        totals = torch.zeros(7, dtype=torch.float64, device=self._parameters[0].device)
        self._totals, (self._steps, self._computed, self._used, self._largest, *clipping) = totals, totals.unbind()
        self._clipped_steps, self._clipped, self._bias = clipping
        self._before = totals.new_zeros(len(self._parameters))

    def begin(self) -> None:
        self._totals.zero_()

    def computed(self) -> None:
        self._before.copy_(gradient_norms(self._parameters))
        norm = self._before.square().sum().sqrt()
        self._steps += 1
        self._computed += norm
        torch.maximum(self._largest, norm, out=self._largest)

    def used(self) -> None:
        after = gradient_norms(self._parameters)
        self._used += after.square().sum().sqrt()
        shorter = after < self._before
        self._clipped_steps += shorter.any()
        self._clipped += shorter.sum() / (self._before > 0).sum().clamp_min(1)
        self._bias += (self._before - after).square().sum().sqrt()

    def metrics(self, round: int) -> dict[str, float]:
        if not self._is_recorded(round):
            return {}
        steps, computed, used, largest, *clipping = self._totals.tolist()
        values = [total / max(steps, 1) for total in (computed, used, *clipping)]
        values.insert(2, largest)
        names = (*METRICS.values(), *CLIPPING.values())
        # What is not finite would have the update dropped, which is for the update's own numbers to decide.
        return {name: value for name, value in zip(names, values, strict=True) if math.isfinite(value)}


def switch_round(snapshot: Snapshot) -> int | None:
    """The first round in which a part of the method trains under frozen statistics, if it ever does."""
    rounds = snapshot.sent.rounds
    for part in snapshot.worker.method.parts:
        calibrates = getattr(part, "calibrates", None) or getattr(part, "freezes", None)
        if calibrates is not None:
            return next((round for round in range(rounds) if calibrates(round, rounds)), None)
    return None


def norm_at_rest(snapshot: Snapshot, client: Client, kind: str) -> float:
    """The mean norm over the batches of the client's training images, nothing being trained."""
    model, norms = snapshot.worker.model.eval(), []
    snapshot.put_local(client)
    for batch in snapshot.batches(client, client.train, snapshot.worker.config.batch_size):
        model.zero_grad(set_to_none=True)
        with batch_statistics(model) if kind == BATCH and len(batch.y) > 1 else nullcontext():
            F.cross_entropy(model(batch.x).logits, batch.y).backward()  # type: ignore[no-untyped-call]
        norms.append(float(gradient_norm(model.parameters())))
    model.zero_grad(set_to_none=True)
    return float(np.mean(norms))


@diagnostic("gradient-norms")
class GradientNormsByRound(Diagnostic):
    """Recorded in training: the norm of all gradients of a local step, averaged over steps and clients, as computed and
    as the optimiser takes them after the method's clipping; where a method switches batch norm to global statistics
    they jump. Made after a run: the same at the models it kept, without steps, under batch and under global statistics.
    """

    title = "Gradient norms"
    paper = "FedCoda, Figure 4"
    of_every_model = True

    def watch(self, is_recorded: Callable[[int], bool]) -> Callable[[nn.Module], StepWatch]:
        return lambda model: GradientNorms(model, is_recorded)

    def measure(self, snapshot: Snapshot) -> Values:
        switch = switch_round(snapshot)
        if not snapshot.updates:
            kinds = (BATCH, GLOBAL) if batch_norms(snapshot.worker.model) else (NO_NORM,)
            at_rest = {kind: {c.name: norm_at_rest(snapshot, c, kind) for c in snapshot.clients} for kind in kinds}
            return {"at rest": at_rest, "switch": switch}
        told = {client: update.metrics for client, update in snapshot.updates.items()}
        found = {
            kind: {client: metrics[name] for client, metrics in told.items() if name in metrics}
            for kind, name in ((kind, WATCHED + metric) for kind, metric in METRICS.items())
        }
        if not found["computed"]:
            raise FedkeelError("no client told the norms of its gradients.")
        return {**found, "switch": switch}

    def figures(self, measured: list[Measured]) -> list[Figure]:
        last = measured[-1].values
        switch = last["switch"]
        text = "" if switch is None else f"Batch norm switches to global statistics in round {from_one(switch)}."
        if "at rest" in last:
            return figures_at_rest(measured, text)
        note = {"note": text} if text else {}
        all_clients = {
            entry.round: {
                "as computed": _mean(entry.values["computed"]),
                "as used": _mean(entry.values["used"]),
                "largest of a step": max(entry.values["largest"].values(), default=None),
            }
            for entry in measured
        }
        by_client = {entry.round: entry.values["computed"] for entry in measured}
        figures = [
            by_round("Over the clients of a round", "gradient norm", all_clients, **note),
            by_round("By client, as computed", "gradient norm", by_client, **note),
        ]
        return keyed(figures, "gradient norm in training", _mean(last["computed"]))


def figures_at_rest(measured: list[Measured], switch: str) -> list[Figure]:
    rounds = [str(from_one(entry.round)) for entry in measured]
    word, points = ("rounds", f"{len(rounds)} points") if len(rounds) > 1 else ("round", "one point")
    kept = f"{word} {', '.join(rounds)}"
    note = (
        f"Made after the run, which has kept the model of {kept}: {points}. For a curve over the rounds, and for what "
        f"the method and its clipping do, run with --record gradient-norms. {switch}"
    ).strip()
    means = {m.round: {kind: _mean(norms) for kind, norms in m.values["at rest"].items()} for m in measured}
    return [
        by_round("Of the models that were kept, mean over the clients", "gradient norm", means, note=note),
        bars(f"By client, {measured[-1]}", "gradient norm", measured[-1].values["at rest"], "client"),
    ]


def _mean(values: dict[str, float]) -> float | None:
    return float(np.mean(list(values.values()))) if values else None


def gradient_norms(parameters: Iterable[Tensor]) -> Tensor:
    """The L2 norm of each parameter's gradient, 0 without one, in double precision, on their device: (P,).

    Reference: FedCoda, Eq. 10 and Lemma 1.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> gradient_norms([weight, torch.zeros(1)]).tolist()
    [5.0, 0.0]
    """
    gradients = [p.new_zeros(()) if p.grad is None else p.grad for p in parameters]
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    return torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """The L2 norm of all gradients together, in double precision, on their device.

    Reference: FedCoda, Figure 4; UniVarFL, Theorem 1.

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> gradient_norm([weight]).item()
    5.0
    """
    return gradient_norms(parameters).square().sum().sqrt()
