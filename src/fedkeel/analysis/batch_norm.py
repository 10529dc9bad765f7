"""Batch-norm statistics of the clients and of the federation, and what they cost.

GReg, Proposition 1, Table 1, Figures 1-3 and 7; HBN, Eqs. 5, 9, 13 and 14; FedWon, Figure 1b.
"""

from collections.abc import Mapping
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeel.analysis.diagnostic import Numbers, diagnostic
from fedkeel.analysis.snapshot import RUNNING, Outputs, Snapshot, some_clients
from fedkeel.errors import FedkeelError
from fedkeel.nn.hybrid_batch_norm import hybrid_norms


@diagnostic("statistics-divergence", paper="GReg, Figure 1", needs="batch-norm statistics")
def statistics_divergence(run: Snapshot) -> Numbers:
    """How far the clients' batch-norm statistics lie apart.

    The variance over the clients of each layer's running means and variances, averaged over channels. The higher it is,
    the worse the global statistics fit any single client.
    """

    # 1/channels sum_c 1/K sum_k (s_k,c - 1/K sum_j s_j,c)^2; the paper leaves the average open.
    def apart(layer: str, kind: str) -> float:
        stacked = torch.stack([layers[layer][kind] for layers in clients])
        return float(stacked.var(dim=0, correction=0).mean())

    clients = list(run.layer_statistics().values())
    by_layer = {kind: {layer: apart(layer, kind) for layer in clients[0]} for kind in RUNNING}
    average = {"variance of batch-norm means over clients": fmean(by_layer["mean"].values())}
    return average | {f"variance of {kind}s over clients by layer": of for kind, of in by_layer.items()}


@diagnostic("statistics-bias", paper="HBN, Eq. 14", better="low", needs="batch-norm statistics of the server")
def statistics_bias(run: Snapshot) -> Numbers:
    """How far the aggregated batch-norm statistics are from the ideal ones.

    The distance of each layer's aggregated mean and variance from those over all clients' training data under the
    global weights, averaged over channels. Zero is what an evaluation needs.
    """
    # |mu_g - mu^_g|, mu^_g = 1/N sum_k sum_i f(w_g, x_k^i), and likewise |sigma_g^2 - sigma^_g^2|. What the layers
    # before normalise with is left open: here as in testing, so that each layer's own fault is seen. The variance is
    # that of the population (Eq. 13 divides by N - 1).
    ideal = run.input_moments(some_clients(run.federation, run.worker.config.seed))

    def bias(layer: str, kind: str) -> float:
        aggregated = run.model.statistics[f"{layer}.{RUNNING[kind]}".lstrip(".")]
        return float((aggregated.double().cpu() - ideal[layer][kind]).abs().mean())

    by_layer = {kind: {layer: bias(layer, kind) for layer in ideal} for kind in RUNNING}
    average = {"distance of batch-norm means from the ideal": fmean(by_layer["mean"].values())}
    return average | {f"distance of {kind}s from the ideal by layer": of for kind, of in by_layer.items()}


@diagnostic("bn-statistics", paper="FedWon, Figure 1b", needs="batch-norm statistics")
def bn_statistics(run: Snapshot) -> Numbers:
    """Batch-norm statistics of clients of different domains, channel by channel.

    Mean and variance of each channel of the last two layers, on the first client of each domain, or, where there is one
    domain only, on the first two clients. Where the lines part, one set of statistics cannot serve all.
    """
    statistics = run.layer_statistics()
    first = {client.domain: client.name for client in reversed(run.clients)}
    clients = [*reversed(first.values())] if len(first) > 1 else list(statistics)[:2]
    return {
        f"{kind} of {layer} by channel": {client: statistics[client][layer][kind] for client in clients}
        for layer in list(statistics[clients[0]])[-2:]
        for kind in RUNNING
    }


@diagnostic("mixing-factors", paper="HBN, Eq. 9", needs="factors of 'hbn'")
def mixing_factors(run: Snapshot) -> Numbers:
    """How much of the global statistics HBN's layers use.

    The learnt weight of the global statistics in each layer's mixture, sigmoid(alpha), averaged over channels: 1 is
    global only, 0 the batch alone, and it begins at 0.5.
    """
    kept = {client.name: run.kept(client.name) for client in run.clients}
    trained = {name: tensors for name, tensors in kept.items() if tensors}
    if not trained:
        raise FedkeelError("What the clients kept is not there: it is in the memory folder of the run.")
    weights = {
        layer: {name: float(own[f"{layer}.alpha"].double().sigmoid().mean()) for name, own in trained.items()}
        for layer in hybrid_norms(run.worker.model)
    }
    means = {layer: fmean(of.values()) for layer, of in weights.items()}
    mean = {"weight of the global statistics": fmean(means.values())}
    return {**mean, "weight by layer": means, "weight by layer and client": weights}


# -- what they cost --------------------------------------------------------------------------------------------------
@diagnostic("loss-gap", paper="GReg, Figures 2 and 3", better="low", needs="batch norm")
def loss_gap(run: Snapshot) -> Numbers:
    """Loss under global minus loss under batch statistics.

    Above zero, the model does worse with the global statistics that it is deployed with than with those of the batch
    that it was trained with. Zero or below is what training on pooled data shows.
    """
    # l(f(x; w, S_g), y) - l(f(x; w, S_b), y): of test samples w is the global model after aggregation, of training
    # samples the client's at the end of its round, and S_g as broadcast; after a run the latter are gone.
    under_global, under_batch = run.tested("global"), run.tested("batch")
    pairs = {"test": {name: list(zip(sets, under_batch[name], strict=True)) for name, sets in under_global.items()}}
    for client in run.clients if run.updates else ():
        pairs.setdefault("training", {}).setdefault(client.domain, []).append(run.trained(client))
    gaps = {
        kind: with_average(
            run,
            {
                domain: float(torch.cat([losses(one) - losses(other) for one, other in both]).mean())
                for domain, both in domains.items()
            },
        )
        for kind, domains in pairs.items()
    }
    averages = {f"loss gap at {kind}": of["average"] for kind, of in gaps.items()}
    return averages | {f"loss gap at {kind} by domain": of for kind, of in gaps.items()}


@diagnostic("statistics-accuracy", paper="GReg, Table 1", better="low", needs="batch norm")
def statistics_accuracy(run: Snapshot) -> Numbers:
    """Accuracy under global and under batch statistics.

    Test accuracy of the global model when batch norm uses the aggregated statistics, and when it uses those of the test
    batch. Batch statistics ahead: the aggregated ones do not fit the domain.
    """

    def accuracy(outputs: Outputs) -> float:
        return float((outputs.logits.argmax(dim=1) == outputs.labels).double().mean())

    found = {
        f"{kind} statistics": with_average(run, {d: fmean(map(accuracy, sets)) for d, sets in run.tested(kind).items()})
        for kind in ("global", "batch")
    }
    lost = found["batch statistics"]["average"] - found["global statistics"]["average"]
    return {"accuracy lost to global statistics (0 to 1)": lost, "accuracy (0 to 1) by statistics and domain": found}


def with_average(run: Snapshot, domains: Mapping[str, float]) -> dict[str, float]:
    """Values by domain, after their mean over the domains that train, each counting the same."""
    trained = [value for domain, value in domains.items() if domain not in run.held_out] or domains.values()
    return {"average": fmean(trained), **domains}


@diagnostic("probability-floor", paper="GReg, Proposition 1, Figure 7", needs="batch norm")
def probability_floor(run: Snapshot) -> Numbers:
    """The smallest probability of the true class.

    Over all training samples, under batch (q_b) and global (q_g) statistics. The bound of Proposition 1 on the loss gap
    is 2/tau sqrt(l_reg), tau the smaller of the two: it says nothing where they are near zero.
    """
    found = [map(losses, run.trained(client)) for client in run.clients]
    q_g, q_b = (float(torch.cat(kind).max().neg().exp()) for kind in zip(*found, strict=True))
    return {"smallest probability of the true class": {"q_b": q_b, "q_g": q_g}}


def losses(outputs: Outputs) -> Tensor:
    """The cross-entropy of each sample."""
    return F.cross_entropy(outputs.logits, outputs.labels, reduction="none")
