"""FPL: Huang et al., "Rethinking Federated Learning with Domain Shift: A Prototype View", CVPR 2023.

The mean of the clients' prototypes of a class lies with the domain that has most of them. So the server clusters them
(FINCH) and keeps one prototype for each cluster, p in P_c, in which a rare domain has its own; and as the target that
does not move with the clusters' number, their plain mean u_c. With z the feature of a sample of class y,

    L = CE + L_CPCL + L_UPCR                                                            from the second round on
    L_CPCL = -log( sum_{p in P_y} exp(cos(z, p) / tau) / sum_{p in all} exp(cos(z, p) / tau) )
    L_UPCR = 1/d ||z - u_y||^2                        with the mean over d of the released code, not the paper's sum

A client's prototype is the mean feature of its samples of a class under the trained local model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

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

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        if "prototypes" not in client.extras:
            return 0.0
        points, classes = client.extras["prototypes"], client.extras["classes"]
        contrast = prototype_contrast(output.features, batch.y, points, classes, self.temperature)
        u_y, known = (client.scratch[name].index_select(0, batch.y) for name in ("means", "known"))
        distance = (precise(output.features) - u_y).square().mean(dim=1)
        nearness: Tensor = distance.where(known, 0).sum() / known.sum().clamp_min(1)
        return contrast + nearness

    def finish(self, client: LocalClient) -> Tensors:
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
