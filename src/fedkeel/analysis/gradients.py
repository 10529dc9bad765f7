"""The gradients of local steps, and of the global objective.

FedCoda, Figure 4, Lemma 1 and Proposition 1; UniVarFL, Theorem 1.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from statistics import fmean

import torch
from torch import Tensor, nn

from fedkeel.analysis.diagnostic import Numbers, diagnostic
from fedkeel.analysis.snapshot import Snapshot, some_clients
from fedkeel.core.state import prefixed
from fedkeel.engine.local import LOCAL, WATCHED
from fedkeel.errors import FedkeelError
from fedkeel.nn.surgery import batch_statistics

MEANS = ("norm as computed", "norm as used", "clipped steps", "clipped gradients", "clipping bias")
LARGEST = "largest norm"
OF_A_ROUND = ("start", "finish", "extras", "before_training")


class StepNorms:
    """Adds up the norms of a client's gradients, in tensors that stay where they are, so that steps can be captured.

    A step counts as clipped if the gradient of any parameter became shorter after the method and the clipping.
    """

    def __init__(self, model: nn.Module, is_due: Callable[[int], bool]) -> None:
        self._parameters, self._is_due = list(model.parameters()), is_due
        self._sums = torch.zeros(2 + len(MEANS), dtype=torch.float64, device=self._parameters[0].device)
        self._steps, self._largest, *self._totals = self._sums.unbind()
        self._before = self._sums.new_zeros(len(self._parameters))

    def begin(self) -> None:
        self._sums.zero_()

    def computed(self) -> None:
        self._before.copy_(gradient_norms(self._parameters))
        norm = self._before.square().sum().sqrt()
        self._steps += 1
        self._totals[0] += norm
        torch.maximum(self._largest, norm, out=self._largest)

    def used(self) -> None:
        _, used, steps, gradients, bias = self._totals
        after = gradient_norms(self._parameters)
        used += after.square().sum().sqrt()
        shorter = after < self._before
        steps += shorter.any()
        gradients += shorter.sum() / (self._before > 0).sum().clamp_min(1)
        bias += (self._before - after).square().sum().sqrt()

    def metrics(self, round: int) -> dict[str, float]:
        """Means over the steps. What is not finite would have the update dropped, which its own numbers decide."""
        steps, largest, *totals = self._sums.tolist()
        found = {LARGEST: largest} | {name: total / max(steps, 1) for name, total in zip(MEANS, totals, strict=True)}
        return {name: value for name, value in found.items() if self._is_due(round) and math.isfinite(value)}


def gradient_norms(parameters: Iterable[Tensor]) -> Tensor:
    """The L2 norm of each parameter's gradient, 0 without one, in double precision, on their device: (P,).

    >>> weight = torch.zeros(2, requires_grad=True)
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> gradient_norms([weight, torch.zeros(1)]).tolist()
    [5.0, 0.0]
    """
    gradients = [p.new_zeros(()) if p.grad is None else p.grad for p in parameters]
    return torch.stack([norm.double() for norm in torch._foreach_norm(gradients)])


def told(run: Snapshot, name: str) -> dict[str, float]:
    """What the clients of a round saw in their steps."""
    metrics = {client: update.metrics for client, update in run.updates.items()}
    found = {client: seen[WATCHED + name] for client, seen in metrics.items() if WATCHED + name in seen}
    if not found:
        raise FedkeelError("No local step is known: they are gone after a run, and must be recorded with --record.")
    return found


@diagnostic("gradient-norms", paper="FedCoda, Figure 4", steps=True)
def gradient_norms_by_round(run: Snapshot) -> Numbers:
    """Gradient norms.

    The norm of all gradients of a local step, averaged over steps and clients, as computed and as the optimiser takes
    them after the method's clipping; where a method switches batch norm to global statistics they jump.
    """
    computed, used, largest = (told(run, name) for name in (*MEANS[:2], LARGEST))
    return {
        "gradient norm in training": fmean(computed.values()),
        "gradient norm": {"as used": fmean(used.values()), "largest of a step": max(largest.values())},
        "gradient norm as computed by client": computed,
    }


@diagnostic("clipping", paper="FedCoda, Lemma 1", needs="gradients that are clipped", steps=True)
def clipping(run: Snapshot) -> Numbers:
    """How often gradients are clipped, and by how much.

    The share of local steps in which a gradient was clipped, the share of all parameters' gradients, and the distance
    between the gradient as computed and as clipped. It shows what a switch of statistics does to training.
    """
    # Proposition 1: ||g~ - g||, the root of sum_i (||g_i|| - ||g~_i||)^2, since clipping scales each g_i and does not
    # turn it; Lemma 1 bounds ||g~_i|| by alpha gamma_i (14), and ||g_i - g~_i|| by what is above that (15).
    steps, gradients, bias = (told(run, name) for name in MEANS[2:])
    return {
        "share of clipped steps (0 to 1)": fmean(steps.values()),
        "share of clipped gradients (0 to 1)": fmean(gradients.values()),
        "clipping bias by client": bias,
    }


@diagnostic("global-gradient", paper="UniVarFL, Theorem 1", better="low", needs="weights of a global model")
def global_gradient(run: Snapshot) -> Numbers:
    """Norm of the global gradient.

    The squared norm of the gradient of all clients' loss together at the global model, whose smallest value over the
    rounds goes to zero as 1/sqrt(T E) where the theorem holds. Training has come to rest where it is small.
    """
    # L = sum_k n_k / N L_k, L_k the mean over the client's training images, without augmentation, under the statistics
    # of batches as in training, of the run's loss and of the terms of methods that depend on a batch alone, such as
    # UniVarFL's. Terms that need the rest of a round are left out: FedProx's has no gradient here.
    worker, model = run.worker, run.worker.model.eval()
    sites = some_clients(run.federation, worker.config.seed)
    samples = sum(site.samples for site in sites)
    parts = [part for part in worker.method.parts if part.overrides("loss")]
    terms = [part for part in parts if not any(map(part.overrides, OF_A_ROUND))]
    model.zero_grad(set_to_none=True)
    for site in sites:
        client = worker.arrive(site.name, run.model, prefixed(run.kept(site.name), LOCAL))
        for batch in run.batches(site, site.train, worker.config.batch_size):
            with batch_statistics(model) if len(batch.y) > 1 else nullcontext():
                output = model(batch.x)
            loss = worker.task_loss(output.logits, batch.y)
            for part in terms:
                loss = loss + part.loss(client, batch, output)
            (loss * (len(batch.y) / samples)).backward()  # type: ignore[no-untyped-call]
    entries = dict(model.named_parameters())
    norms = gradient_norms(entries[name] for name in worker.layout.weights if name in entries)
    model.zero_grad(set_to_none=True)
    return {"squared norm of the global gradient": float(norms.square().sum())}
