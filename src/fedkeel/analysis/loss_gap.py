"""The loss gap between global and batch statistics, at test time and in training (GReg, Section 3, Figures 2 and 3).

    test time       D_te = l(f(x; w_g, S_g), y) - l(f(x; w_g, S_b), y)       after aggregation, on test samples
    training time   D_tr = l(f(x; w_k, S_g), y) - l(f(x; w_k, S_b), y)       S_g as broadcast, on training samples

w_g the global and w_k a client's weights, S_g the global statistics and S_b those of the batch, l the cross-entropy;
both are `loss_gap`. The paper leaves open when in local training w_k is taken and how samples are
averaged. Here w_k is what the client has at the end of its round; each domain's gap is the mean over its samples, and
the average is over the domains that train. Test batches have `evaluation_batch` samples, training batches `batch_size`,
in a random order that is always the same.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeel.analysis import Diagnostic, Measured, Outputs, Snapshot, Values, diagnostic, over_rounds
from fedkeel.analysis.figures import Figure, bars, keyed
from fedkeel.data.federation import Client
from fedkeel.formulas.similarity import precise


@diagnostic("loss-gap")
class LossGap(Diagnostic):
    """Above zero, the model does worse with the global statistics that it is deployed with than with those of the batch
    that it was trained with. Zero or below is what training on pooled data shows."""

    title = "Loss under global minus loss under batch statistics"
    paper = "GReg, Section 3, Figures 2 and 3"
    needs = "batch norm"

    def measure(self, snapshot: Snapshot) -> Values:
        found: dict[str, dict[str, list[Tensor]]] = {"test": {}}  # by kind and domain

        def add(kind: str, client: Client, under_global: Outputs, under_batch: Outputs) -> None:
            gaps = loss_gap(under_global.logits, under_batch.logits, under_batch.labels)
            found.setdefault(kind, {}).setdefault(client.domain, []).append(gaps)

        for client in (client for clients in snapshot.testers().values() for client in clients):
            add("test", client, snapshot.test_outputs(client), snapshot.test_outputs(client, "batch"))
        for client in snapshot.clients if snapshot.updates else ():  # after the run their own models are gone
            add("training", client, *snapshot.training_outputs(client))
        return {
            kind: snapshot.with_average({domain: float(torch.cat(every).mean()) for domain, every in domains.items()})
            for kind, domains in found.items()
        }

    def figures(self, measured: list[Measured]) -> list[Figure]:
        figures = []
        for kind, title in (("test", "Test-time loss gap"), ("training", "Training-time loss gap")):
            having = [entry for entry in measured if kind in entry.values]
            figures += over_rounds(title, "loss gap", having, kind) or [
                bars(f"{title}, {entry}", "loss gap", {"gap": entry.values[kind]}, "domain") for entry in having
            ]
        last = measured[-1].values
        figures[0]["numbers"] = {kind: domains["average"] for kind, domains in last.items()}
        return keyed(figures, "test-time loss gap", last["test"]["average"], "low")


def loss_gap(logits_global: Tensor, logits_batch: Tensor, labels: Tensor) -> Tensor:
    """What a sample's cross-entropy loses by using global instead of batch statistics.

        Delta = l(q_g, y) - l(q_b, y),    l(q, y) = -log q^y

    Args:
        logits_global, logits_batch: (B, C), under global and under batch statistics.
        labels: (B,), int64.

    Returns:
        (B,). Positive: the sample is predicted worse under global statistics.

    Reference: GReg, Sec. 3 (the training-time and the test-time loss gap).

    >>> half, quarter = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    >>> [round(gap, 4) for gap in loss_gap(quarter, half, torch.tensor([0])).tolist()]  # log 2
    [0.6931]
    """
    under_global = F.cross_entropy(precise(logits_global), labels, reduction="none")
    under_batch = F.cross_entropy(precise(logits_batch), labels, reduction="none")
    return under_global - under_batch
