"""FedHEAL: Chen, Huang and Ye, "Fair Federated Learning under Domain Skew with Local Consistency and Domain Diversity",
CVPR 2024.

Two rules for a mean in which no domain drowns. Entries of the weights that a client moves to and fro from round to
round are noise of that client: an entry counts only if the client has moved it that way often enough before. And a
client that is still far from the global model counts for more. With u_k = w - w_k of client k in its round t:

    h_k = share of its earlier rounds with u_k >= 0                                  entry by entry
    M_k = 1 where (h_k if u_k >= 0 else 1 - h_k) > tau, else 0; all 1 in its first round
    d_k = sum over tensors ||M_k u_k||_2
    delta_k <- (1 - beta) delta_k + beta d_k / sum_j d_j,    p_k <- p_k + delta_k    at first p_k = 1/K, delta_k = 0
    w <- w - sum_k p_k M_k u_k / sum_k p_k M_k                                       unchanged where no client counts

A history says which way a client's own training went in every round, so it stays there: a client keeps its counts and
sends the mask, one byte for each weight. The server keeps p_k and delta_k, two numbers for each client. The public code
simulates all of it in one place; it also masks batch-norm statistics, takes a client's absence for a round of its
history, and divides by the last distances of absent clients. Here statistics keep their own rule. Since all p_k grow
from round to round, a client that comes for the first time in a later one begins with the mean of theirs, not with 1/K.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedkeel.core.client import LocalClient
from fedkeel.core.messages import Expected, Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors, select
from fedkeel.errors import FedkeelError
from fedkeel.methods import register


@register("fedheal")
class FedHEAL(Method):
    """Counts an entry only where a client moves it consistently, and distant clients for more."""

    paper = "Chen et al. 2024 (FedHEAL)"
    traits = Traits(needs_memory=True, replaces={"shares", "weights"})

    def __init__(self, tau: float = 0.3, beta: float = 0.4) -> None:
        """`tau`: share of earlier rounds above which a direction is consistent. `beta`: momentum of the weights."""
        for option, number in (("tau", tau), ("beta", beta)):
            if not 0 <= number <= 1:
                raise FedkeelError(f"The '{option}' of fedheal is {number}: give a number from 0 to 1.")
        self.tau, self.beta = tau, beta

    # -- on the client ---------------------------------------------------------------------------------------
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

    # -- on the server ---------------------------------------------------------------------------------------
    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        return {name: Expected(tuple(weight.shape), torch.bool) for name, weight in server.weights.items()}

    def weights(self, server: Server, updates: Sequence[Update], mean: Tensors) -> Tensors:
        shares = self._shares(server, updates)
        new: Tensors = {}
        for name, old in server.weights.items():
            # A running mean over those who count: exact where all of them agree, and the old one where nobody counts.
            result, so_far = old, torch.zeros_like(old)
            for share, update in zip(shares, updates, strict=True):
                counted = share * update.extras[name].to(old.dtype)
                so_far = so_far + counted
                ratio = torch.where(so_far > 0, counted / so_far, torch.zeros_like(so_far))
                result = torch.lerp(result, update.weights[name], ratio)
            new[name] = result
        return new

    def _shares(self, server: Server, updates: Sequence[Update]) -> list[float]:
        """p_k of the round's clients, after this round's step."""
        distances = [self._distance(server, update) for update in updates]
        total = sum(distances)
        known = [float(share) for share in select(server.memory, "share").values()]
        first = sum(known) / len(known) if known else 1 / len(updates)
        shares = []
        for update, distance in zip(updates, distances, strict=True):
            part = distance / total if total > 0 else 1 / len(updates)
            delta = (1 - self.beta) * float(server.memory.get(f"delta/{update.client}", 0.0)) + self.beta * part
            share = float(server.memory.get(f"share/{update.client}", first)) + delta
            server.memory |= {
                f"delta/{update.client}": torch.tensor(delta, dtype=torch.float64),
                f"share/{update.client}": torch.tensor(share, dtype=torch.float64),
            }
            shares.append(share)
        return shares

    @staticmethod
    def _distance(server: Server, update: Update) -> float:
        norms: list[Tensor] = [
            torch.linalg.vector_norm((old - update.weights[name]) * update.extras[name]).double()
            for name, old in server.weights.items()
        ]
        return float(torch.stack(norms).sum())
