"""FPL: Huang et al., "Rethinking Federated Learning with Domain Shift: A Prototype View", CVPR 2023.

The mean of the clients' prototypes of a class lies with the domain that has most of them. So the server clusters them
(FINCH) and keeps one prototype for each cluster, p in P_c, in which a rare domain has its own; and as the target that
does not move with the clusters' number, their plain mean u_c. With z the feature of a sample of class y,

    L = CE + L_CPCL + L_UPCR
    L_CPCL = -log( sum_{p in P_y} exp(cos(z, p) / tau) / sum_{p in all} exp(cos(z, p) / tau) )
    L_UPCR = 1/d ||z - u_y||^2

from the second round on. The sum over dimensions of L_UPCR in the paper is a mean in the released code, which is what
its results are of, so it is here. A client's prototype is the mean feature of its samples of a class: of the trained
local model in evaluation mode, as the paper's definition has it, or, as the code does, of the features that training
itself saw in its last epoch (`prototypes="seen"`), which costs no pass over the data.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch
from torch import Tensor

from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.messages import Expected, Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.core.types import Classifier, Output
from fedkeel.errors import FedkeelError, nearest
from fedkeel.formulas.prototypes import class_means, local_prototypes, prototype_contrast, regrouped
from fedkeel.methods import register

PROTOTYPES = ("pass", "seen")


@register("fpl")
class FPL(Method):
    """Draws features to their class's prototypes, one for each cluster of clients, and to the mean of these."""

    paper = "Huang et al. 2023 (FPL)"
    traits = Traits(capturable=True)

    def __init__(self, temperature: float = 0.02, prototypes: str = "pass") -> None:
        """`temperature`: tau of L_CPCL. `prototypes`: from a "pass" over the local data after training, or of the
        features "seen" in the last epoch."""
        if temperature <= 0:
            raise FedkeelError(f"The 'temperature' of fpl is {temperature}: give a number above 0.")
        if prototypes not in PROTOTYPES:
            raise FedkeelError(f"The 'prototypes' of fpl is '{prototypes}': {nearest(str(prototypes), PROTOTYPES)}")
        self.temperature, self.prototypes = temperature, prototypes

    # -- on the client ---------------------------------------------------------------------------------------
    def start(self, client: LocalClient) -> None:
        if "prototypes" in client.extras:
            client.scratch["means"], client.scratch["known"] = class_means(
                client.extras["prototypes"], client.extras["classes"], client.num_classes
            )
        if self.prototypes == "seen":
            client.scratch["seen"] = seen_features(client)

    def step_variant(self, client: LocalClient) -> Hashable:
        return "prototypes" in client.extras

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
            seen = client.scratch["seen"]
            means, present = seen["sums"] / seen["counts"].clamp_min(1)[:, None], seen["counts"] > 0
        else:
            batches = client.data.passes(client.config.evaluation_batch)
            means, present = local_prototypes(client.model, batches, client.num_classes)
        return {"prototypes": means, "present": present}

    # -- on the server ---------------------------------------------------------------------------------------
    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        assert server.network is not None
        classes, width = server.network.num_classes, server.network.feature_dim
        return {"prototypes": Expected((classes, width)), "present": Expected((classes,), torch.bool)}

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        sent = [update.extras for update in updates]
        classes = [torch.arange(len(e["present"]), device=e["present"].device).where(e["present"], -1) for e in sent]
        last = server.extras
        points, of_class = regrouped(
            [(extras["prototypes"], c) for extras, c in zip(sent, classes, strict=True)],
            (last["prototypes"], last["classes"]) if "prototypes" in last else None,
        )
        return {"prototypes": points, "classes": of_class}


def mean_distance(features: Tensor, labels: Tensor, means: Tensor, known: Tensor) -> Tensor:
    """L_UPCR: 1/d ||z - u_y||^2, mean over the samples whose class is known. (B, d), (B,), (C, d), (C,) -> scalar."""
    features = features.float() if features.dtype in (torch.float16, torch.bfloat16) else features
    distance = (features - means.index_select(0, labels)).square().mean(dim=1)
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
        seen["sums"] += own.float() @ features.float()
    counts += own.sum(dim=1)
