"""The bound on the loss gap and its tau (GReg, Proposition 1 and Figure 7).

    |l(q_g, y) - l(q_b, y)| <= 2/tau sqrt(l_reg),   tau = min(q_b^y, q_g^y),   l_reg = (KL(q_b||q_g) + KL(q_g||q_b)) / 2

q_b and q_g are the predicted probabilities of a client's model under batch statistics and under the global ones it
was sent, y the true class; the two sides are `loss_gap` and `loss_gap_bound`. Figure 7 plots the
smallest q_b^y and q_g^y "across all samples in each round": here all training samples of the round's clients, with the
weights at the end of local training. After a run the final global model takes the place of the clients'.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeel.analysis import Diagnostic, Measured, Snapshot, Values, diagnostic, over_rounds
from fedkeel.analysis.figures import Figure, table
from fedkeel.analysis.loss_gap import loss_gap

FLOORS = ("smallest q_b^y", "smallest q_g^y")
BOUND = ("mean |gap|", "mean bound")
NUMBERS = (*FLOORS, *BOUND, "samples within the bound")


@diagnostic("probability-floor")
class ProbabilityFloor(Diagnostic):
    """The smallest predicted probability of the true class over all training samples, under batch (q_b) and global
    (q_g) statistics. The bound of Proposition 1 on the loss gap is 2/tau sqrt(l_reg), tau the smaller of the two."""

    title = "The smallest probability of the true class, and the bound on the loss gap"
    paper = "GReg, Proposition 1, Figure 7"
    needs = "batch norm"

    def measure(self, snapshot: Snapshot) -> Values:
        found = []
        for client in snapshot.clients:
            (_, under_global, labels), (_, under_batch, _) = snapshot.training_outputs(client)
            pair = (under_global, under_batch, labels)
            floors = (true_class_probability(logits, labels) for logits in (under_batch, under_global))
            found.append((*floors, loss_gap(*pair).abs(), loss_gap_bound(*pair)))
        q_b, q_g, gaps, bound = map(torch.cat, zip(*found, strict=True))
        # Rounding may put a gap of nearly nothing above a bound of nearly nothing.
        within = (gaps <= bound + 1e-9).double()
        values = (q_b.min(), q_g.min(), gaps.mean(), bound.mean(), within.mean())
        return dict(zip(NUMBERS, map(float, values), strict=True))

    def figures(self, measured: list[Measured]) -> list[Figure]:
        def lines(title: str, label: str, names: tuple[str, ...]) -> list[Figure]:
            return over_rounds(title, label, measured, lambda v: {name: v[name] for name in names}, log_y=True)

        last = measured[-1]
        return [
            *lines("Smallest probability of the true class", "probability", FLOORS),
            *lines("The loss gap and its bound", "mean over samples", BOUND),
            table(str(last).capitalize(), ["", "value"], [[name, last.values[name]] for name in NUMBERS]),
        ]


def true_class_probability(logits: Tensor, labels: Tensor) -> Tensor:
    """q^y, the predicted probability of the true class: (N, C) and (N,) -> (N,).

    Reference: GReg, Proposition 1 and Figure 7.

    >>> true_class_probability(torch.tensor([[0.8, 0.2]]).log(), torch.tensor([0]))
    tensor([0.8000])
    """
    return F.cross_entropy(logits, labels, reduction="none").neg().exp()


def loss_gap_bound(logits_global: Tensor, logits_batch: Tensor, labels: Tensor) -> Tensor:
    """The most that `loss_gap` can be, by the divergence that GReg minimises.

        |l(q_g, y) - l(q_b, y)| <= 2 / tau * sqrt(l_reg),    tau = min(q_b^y, q_g^y)

    Computed in float64, so that a tiny tau makes the bound large and not undefined.

    Args:
        logits_global, logits_batch: (B, C), under global and under batch statistics.
        labels: (B,), int64.

    Returns:
        (B,), float64, at least 0.

    Reference: GReg, Proposition 1.

    >>> half, quarter = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> [round(bound, 4) for bound in loss_gap_bound(quarter, half, torch.tensor([0])).tolist()]  # 8 sqrt(log 3 / 8)
    [2.9646]
    """
    logits_global, logits_batch = logits_global.double(), logits_batch.double()
    log_tau = torch.minimum(
        -F.cross_entropy(logits_global, labels, reduction="none"),
        -F.cross_entropy(logits_batch, labels, reduction="none"),
    )
    tau = log_tau.exp().clamp_min(torch.finfo(torch.float64).tiny)
    log_g, log_b = logits_global.log_softmax(dim=-1), logits_batch.log_softmax(dim=-1)
    l_reg = ((log_g.exp() - log_b.exp()) * (log_g - log_b)).sum(dim=-1) / 2
    return 2 / tau * l_reg.sqrt()
