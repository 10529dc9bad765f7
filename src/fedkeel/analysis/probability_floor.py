"""The bound on the loss gap and its tau (GReg, Proposition 1 and Figure 7).

    |l(q_g, y) - l(q_b, y)| <= 2/tau sqrt(l_reg),   tau = min(q_b^y, q_g^y),   l_reg = (KL(q_b||q_g) + KL(q_g||q_b)) / 2

q_b and q_g are the predicted probabilities of a client's model under batch statistics and under the global ones it
was sent, y the true class. Figure 7 plots the smallest q_b^y and q_g^y "across all samples in each round": here all
training samples of the round's clients, with the weights at the end of local training. After a run the final global
model takes the place of the clients'.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedkeel.analysis.diagnostic import Diagnostic, Measured, Values, diagnostic
from fedkeel.analysis.figures import Figure, by_round, table
from fedkeel.analysis.loss_gap import log_probabilities, loss_gaps
from fedkeel.analysis.moment import Array, Moment, Outputs
from fedkeel.config import from_one

NUMBERS = ("smallest q_b^y", "smallest q_g^y", "mean |gap|", "mean bound", "samples within the bound")


def true_probabilities(outputs: Outputs) -> Array:
    """q^y of each sample, (N,)."""
    return np.asarray(np.exp(log_probabilities(outputs.logits)[np.arange(len(outputs.labels)), outputs.labels]))


def regularisers(under_batch: Outputs, under_global: Outputs) -> Array:
    """l_reg of each sample (Eq. 5), (N,): both divergences together are sum_c (p_c - q_c)(log p_c - log q_c)."""
    log_b, log_g = log_probabilities(under_batch.logits), log_probabilities(under_global.logits)
    return np.asarray(((np.exp(log_b) - np.exp(log_g)) * (log_b - log_g)).sum(axis=1) / 2)


def bounds(under_batch: Outputs, under_global: Outputs) -> Array:
    """2/tau sqrt(l_reg) of each sample (Proposition 1), (N,); infinite where tau vanishes in double precision."""
    tau = np.minimum(true_probabilities(under_batch), true_probabilities(under_global))
    with np.errstate(divide="ignore", invalid="ignore"):
        bound = 2 / tau * np.sqrt(np.maximum(regularisers(under_batch, under_global), 0))
    return np.asarray(np.where(tau > 0, bound, np.inf))


@diagnostic("probability-floor")
class ProbabilityFloor(Diagnostic):
    """Smallest probability of the true class under both kinds of statistics, and the bound that rests on it."""

    title = "The smallest probability of the true class, and the bound on the loss gap"
    what = (
        "The smallest predicted probability of the true class over all training samples, under batch (q_b) and global "
        "(q_g) statistics. The bound of Proposition 1 on the loss gap is 2/tau sqrt(l_reg), tau the smaller of the two."
    )
    paper = "GReg, Proposition 1, Figure 7"
    needs_batch_norm = True

    def measure(self, moment: Moment) -> Values:
        size = moment.worker.config.batch_size
        found: list[tuple[Array, Array, Array, Array]] = []
        for client in moment.clients:
            moment.put_local(client, statistics="sent")
            under_batch = moment.outputs(client, client.train, batch_size=size, statistics="batch")
            under_global = moment.outputs(client, client.train, batch_size=size)
            gaps = np.abs(loss_gaps(under_global, under_batch))
            pair = true_probabilities(under_batch), true_probabilities(under_global)
            found.append((*pair, gaps, bounds(under_batch, under_global)))
        q_b, q_g, gaps, bound = (np.concatenate(parts) for parts in zip(*found, strict=True))
        # Rounding may put a gap of nearly nothing above a bound of nearly nothing.
        within = float(np.mean(gaps <= bound + 1e-9))
        values = (q_b.min(), q_g.min(), gaps.mean(), bound.mean(), within)
        return {name: float(value) for name, value in zip(NUMBERS, values, strict=True)}

    def figures(self, measured: Sequence[Measured]) -> list[Figure]:
        figures = []
        if len(measured) > 1:
            for title, label, names in (
                ("Smallest probability of the true class", "probability", NUMBERS[:2]),
                ("The loss gap and its bound", "mean over samples", NUMBERS[2:4]),
            ):
                rounds = {entry.round: {name: entry.values[name] for name in names} for entry in measured}
                figures.append(by_round(title, label, rounds, log_y=True))
        last = measured[-1]
        return [
            *figures,
            table(f"Round {from_one(last.round)}", ["", "value"], [[name, last.values[name]] for name in NUMBERS]),
        ]
