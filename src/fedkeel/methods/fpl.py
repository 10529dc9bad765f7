"""FPL: Huang et al., "Rethinking Federated Learning with Domain Shift: A Prototype View", CVPR 2023.

The mean of the clients' prototypes of a class lies with the domain that has most of them. So the server clusters them
(FINCH) and keeps one prototype for each cluster, p in P_c, in which a rare domain has its own; and as the target that
does not move with the clusters' number, their plain mean u_c. With z the feature of a sample of class y,

    L = CE + L_CPCL + L_UPCR                                                            from the second round on
    L_CPCL = -log( sum_{p in P_y} exp(cos(z, p) / tau) / sum_{p in all} exp(cos(z, p) / tau) )
    L_UPCR = 1/d ||z - u_y||^2                        with the mean over d of the released code, not the paper's sum

A client's prototype is the mean feature of its samples of a class: of the trained local model in evaluation mode, or,
as released, of the features that training itself saw in its last epoch, which costs no pass (`prototypes="seen"`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedkeel.core.types import Classifier
from fedkeel.formulas.prototypes import class_means, local_prototypes, prototype_contrast, regrouped
from fedkeel.formulas.similarity import precise
from fedkeel.methods import Batch, Expected, LocalClient, Method, Output, Server, Tensors, Traits, Update, register
from fedkeel.options import Positive


class ClusterPrototypes(Method):
    """What FPL and FedPLVM share: prototypes of the server that are clusters of the clients', from the second round."""

    def start(self, client: LocalClient) -> None:
        if "prototypes" in client.extras:
            client.scratch["means"], client.scratch["known"] = class_means(
                client.extras["prototypes"], client.extras["classes"], client.num_classes
            )

    @staticmethod
    def regroup(server: Server, sent: Sequence[tuple[Tensor, Tensor]]) -> Tensors:
        """The next broadcast's, from each client's prototypes and their classes."""
        last = (server.extras["prototypes"], server.extras["classes"]) if server.extras else None
        return dict(zip(("prototypes", "classes"), regrouped(sent, last), strict=True))


@register("fpl")
@dataclass
class FPL(ClusterPrototypes):
    """Draws features to their class's prototypes, one for each cluster of clients, and to the mean of these."""

    paper = "Huang et al. 2023 (FPL)"
    traits = Traits(capturable=True)

    temperature: Positive = 0.02  # tau of L_CPCL
    prototypes: Literal["pass", "seen"] = "pass"  # over the local data after training, or of the last epoch's features

    def start(self, client: LocalClient) -> None:
        super().start(client)
        if self.prototypes == "seen":
            client.scratch["seen"] = seen_features(client)

    def inputs(self, client: LocalClient, x: Tensor) -> Tensor:
        if self.prototypes == "seen":
            client.scratch["seen"]["wait"] -= 1  # here and not in the loss, which `recompute` may call once more
        return x

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        if self.prototypes == "seen":
            record(client.scratch["seen"], output.features, batch.y)
        if "prototypes" not in client.extras:
            return 0.0
        points, classes = client.extras["prototypes"], client.extras["classes"]
        contrast = prototype_contrast(output.features, batch.y, points, classes, self.temperature)
        return contrast + mean_distance(output.features, batch.y, client.scratch["means"], client.scratch["known"])

    def finish(self, client: LocalClient) -> Tensors:
        if self.prototypes == "seen":
            counts = client.scratch["seen"]["counts"]
            means = client.scratch["seen"]["sums"] / counts.clamp_min(1)[:, None]
        else:
            batches = client.data.passes(client.config.evaluation_batch)
            means, counts = local_prototypes(client.model, batches, client.num_classes)
        return {"prototypes": means, "present": counts > 0}

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        classes, width = server.network.num_classes, server.network.feature_dim
        return {"prototypes": Expected((classes, width)), "present": Expected((classes,), torch.bool)}

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        sent = [(update.extras["prototypes"], update.extras["present"]) for update in updates]
        classes = [torch.arange(len(present), device=present.device).where(present, -1) for _, present in sent]
        return self.regroup(server, [(points, c) for (points, _), c in zip(sent, classes, strict=True)])


def mean_distance(features: Tensor, labels: Tensor, means: Tensor, known: Tensor) -> Tensor:
    """L_UPCR: 1/d ||z - u_y||^2, mean over the samples whose class is known. (B, d), (B,), (C, d), (C,) -> scalar."""
    distance = (precise(features) - means.index_select(0, labels)).square().mean(dim=1)
    counts = known.index_select(0, labels)
    return distance.where(counts, 0).sum() / counts.sum().clamp_min(1)


def seen_features(client: LocalClient) -> Tensors:
    """Where the features of the last epoch are summed: a countdown of steps, below 0 from then on, and the sums."""
    config, model = client.config, client.model
    assert isinstance(model, Classifier)
    whole, rest = divmod(client.samples, config.batch_size)
    steps = whole if config.drop_last and whole else whole + (rest > 0)
    return {
        "wait": torch.tensor(steps * (config.local_epochs - 1), device=client.device),
        "sums": torch.zeros(client.num_classes, model.feature_dim, device=client.device),
        "counts": torch.zeros(client.num_classes, device=client.device),
    }


@torch.no_grad()
def record(seen: Tensors, features: Tensor, labels: Tensor) -> None:
    """Add a batch, if the last epoch has begun."""
    counts = seen["counts"]
    own = (labels == torch.arange(len(counts), device=labels.device)[:, None]) & (seen["wait"] < 0)
    with torch.autocast(features.device.type, enabled=False):
        sums = seen["sums"]
        sums += own.to(sums.dtype) @ features.to(sums.dtype)
    counts += own.sum(dim=1)
