"""FedHEAL: Chen, Huang and Ye, "Fair Federated Learning under Domain Skew with Local Consistency and Domain Diversity",
CVPR 2024.

Two rules for a mean in which no domain drowns. An entry of the weights that a client moves to and fro is its noise: it
counts only if the client has moved it that way often enough before. And a client that is still far from the global
model counts for more. With u_k = w - w_k of client k in its round t:

    h_k = share of its earlier rounds with u_k >= 0                                  entry by entry
    M_k = 1 where (h_k if u_k >= 0 else 1 - h_k) > tau, else 0; all 1 in its first round
    d_k = sum over tensors ||M_k u_k||_2
    delta_k <- (1 - beta) delta_k + beta d_k / sum_j d_j,    p_k <- p_k + delta_k    at first p_k = 1/K, delta_k = 0
    w <- w - sum_k p_k M_k u_k / sum_k p_k M_k                                       unchanged where no client counts

A history says which way a client's own training went, so it stays there, and the mask is sent. All p_k grow, so that a
client that comes for the first time in a later round begins with the mean of theirs, not with 1/K.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedkeel.methods import Expected, LocalClient, Method, Server, Tensors, Traits, Update, register
from fedkeel.options import Share


@register("fedheal")
@dataclass
class FedHEAL(Method):
    """Counts an entry only where a client moves it consistently, and distant clients for more."""

    paper = "Chen et al. 2024 (FedHEAL)"
    traits = Traits(needs_memory=True, replaces={"shares", "weights"})

    tau: Share = 0.3  # share of earlier rounds above which a direction is consistent
    beta: Share = 0.4  # momentum of the weights

    @torch.no_grad()
    def finish(self, client: LocalClient) -> Tensors:
        trained, memory = client.model.state_dict(), client.memory
        rounds = memory.get("rounds", torch.zeros((), dtype=torch.int32, device=client.device))
        masks: Tensors = {}
        kept: Tensors = {"rounds": rounds + 1}
        for name, start in client.broadcast.weights.items():
            fell = start - trained[name] >= 0
            falls = memory.get(f"falls/{name}", torch.zeros_like(fell, dtype=torch.int32))
            same = torch.where(fell, falls, rounds - falls)
            masks[name] = (same > self.tau * rounds) | (rounds == 0)
            kept[f"falls/{name}"] = falls + fell
        client.memory = kept
        return masks

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        return {name: Expected(tuple(weight.shape), torch.bool) for name, weight in server.weights.items()}

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        shares = self._shares(server, updates)
        new: Tensors = {}
        for name, old in server.weights.items():
            # A running mean over those who count: exact where all of them agree, and the old one where nobody counts.
            new[name], so_far = old, torch.zeros_like(old)
            for update in updates:
                counted = shares[update.client] * update.extras[name].to(old.dtype)
                so_far = so_far + counted
                ratio = torch.where(so_far > 0, counted / so_far, torch.zeros_like(so_far))
                new[name] = torch.lerp(new[name], update.weights[name], ratio)
        return new

    def _shares(self, server: Server, updates: Sequence[Update]) -> dict[str, float]:
        """p_k of all clients, after this round's step."""
        d: dict[str, float] = {}
        for update in updates:
            masked = [(old - update.weights[name]) * update.extras[name] for name, old in server.weights.items()]
            d[update.client] = float(torch.stack([torch.linalg.vector_norm(u).double() for u in masked]).sum())
        total, p, delta = sum(d.values()), server.noted("share"), server.noted("delta")
        first = sum(p.values()) / len(p) if p else 1 / len(updates)
        for k, distance in d.items():
            part = distance / total if total > 0 else 1 / len(updates)
            delta[k] = (1 - self.beta) * delta.get(k, 0.0) + self.beta * part
            p[k] = p.get(k, first) + delta[k]
        server.note("share", p)
        server.note("delta", delta)
        return p
