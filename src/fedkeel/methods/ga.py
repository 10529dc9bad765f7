"""GA: Zhang et al., "Federated Domain Generalization with Generalization Adjustment", CVPR 2023 (FedDG-GA).

A client on whose data the global model is worse than the client's own counts for too little. So its weight in the mean
grows, and that of clients which the mean helps shrinks. With s the accuracy on client k's validation data (or minus the
loss), after each round:

    g_k = s_k(local model after training) - s_k(global model after aggregation)         the generalisation gap
    a_k <- clip(a_k + d (1 - t/T) / K * g_k / max_j |g_j|, 0, 1),  then normalised      a_k = 1/K in the first round

with step size d, round t of T, K clients. That is the authors' released code; the paper's formula takes the mean of the
gaps off each first (`centred`). A public port has the sign reversed and measures on test data; nothing of that here. A
client without validation data measures on its training data.

Under partial participation a_k of the others stays as it is, and so does the sum over those that took part. When a
federation grows from K to K' clients, a newcomer has 1/K' and the others K/K' of what they had. The gaps
of a round are asked for at the start of the next, when the aggregated model is what the server has. Statistics are
averaged with the same weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.messages import Expected, Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors, prefixed, select
from fedkeel.errors import FedkeelError, nearest
from fedkeel.methods import register

MEASURES = ("accuracy", "loss")


@register("ga")
class GA(Method):
    """Raises the weight of clients on whose data the global model is worse than their own."""

    paper = "Zhang et al. 2023"
    traits = Traits(replaces={"shares"})

    def __init__(self, step_size: float = 0.2, measure: str = "accuracy", centred: bool = False) -> None:
        """`step_size`: d. `measure`: "accuracy" or "loss". `centred`: take the mean of the gaps off each, as in the
        paper's formula and not in its code.
        """
        if not 0 <= step_size <= 1:
            raise FedkeelError(f"The 'step_size' of ga is {step_size}: give a number from 0 to 1.")
        if measure not in MEASURES:
            raise FedkeelError(f"The 'measure' of ga is '{measure}': {nearest(str(measure), MEASURES)}")
        self.step_size, self.measure, self.centred = step_size, measure, centred

    # -- on the client ---------------------------------------------------------------------------------------
    def finish(self, client: LocalClient) -> Tensors:
        return {"score": self._score(client)}

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        if question != "score":
            return super().answer(client, question, tensors)
        return {"score": self._score(client)}

    @torch.no_grad()
    def _score(self, client: LocalClient) -> Tensor:
        """The higher the better, over the client's validation data, or its training data where it has none."""
        training = client.model.training
        client.model.eval()
        total, samples = torch.zeros((), dtype=torch.float64, device=client.device), 0
        for batch in self._batches(client):
            logits = client.model(batch.x).logits.float()
            if self.measure == "accuracy":
                total += (logits.argmax(1) == batch.y).sum()
            else:
                total -= F.cross_entropy(logits, batch.y, reduction="sum")
            samples += len(batch.y)
        client.model.train(training)
        return total / samples

    @staticmethod
    def _batches(client: LocalClient) -> Iterator[Batch]:
        size = client.config.evaluation_batch
        held_out = client.data.validation(size)
        first = next(held_out, None)
        if first is None:
            yield from client.data.passes(size)
        else:
            yield first
            yield from held_out

    # -- on the server ---------------------------------------------------------------------------------------
    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        least, most = (0.0, 1.0) if self.measure == "accuracy" else (None, 0.0)
        return {"score": Expected((), torch.float64, least, most)}

    def before_training(self, server: Server) -> None:
        """The last round's clients tell how the model that was made of theirs does, and their weights follow."""
        self._make_room(server)
        local = select(server.memory, "local")
        kept = {name: tensor for name, tensor in server.memory.items() if not name.startswith("local/")}
        if local:
            answers = server.ask(list(local), "score")
            scores = {name: answer.tensors.get("score") for name, answer in answers.items()}
            gaps = {
                name: float(local[name]) - float(s) for name, s in scores.items() if s is not None and s.shape == ()
            }
            step = self.step_size * (1 - (server.round - 1) / server.rounds) / server.num_clients
            weights = adjusted({name: self._weight(server, name) for name in gaps}, gaps, step, self.centred)
            kept |= prefixed({name: torch.tensor(a, dtype=torch.float64) for name, a in weights.items()}, "weight")
        server.memory = kept

    def shares(self, server: Server, updates: Sequence[Update], shares: Sequence[float]) -> Sequence[float]:
        weights = [self._weight(server, update.client) for update in updates]
        return weights if sum(weights) > 0 else [1.0] * len(weights)

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        """Nothing to send: remember how the local models did, until the global one is measured."""
        server.memory |= prefixed({update.client: update.extras["score"] for update in updates}, "local")
        return {}

    @staticmethod
    def _make_room(server: Server) -> None:
        """Clients that joined since have 1/K each, so the weights of the others add up to what is left."""
        weights, known = select(server.memory, "weight"), int(server.memory.get("clients", server.num_clients))
        if known != server.num_clients:
            weights = {name: weight * known / server.num_clients for name, weight in weights.items()}
        server.memory |= prefixed(weights, "weight") | {"clients": torch.tensor(server.num_clients)}

    @staticmethod
    def _weight(server: Server, client: str) -> float:
        return float(server.memory.get(f"weight/{client}", 1 / server.num_clients))


def adjusted(weights: dict[str, float], gaps: dict[str, float], step: float, centred: bool = False) -> dict[str, float]:
    """The clients' new weights from their gaps; their sum stays."""
    mean = sum(gaps.values()) / max(len(gaps), 1) if centred else 0.0
    signals = {name: gap - mean for name, gap in gaps.items()}
    largest = max((abs(signal) for signal in signals.values()), default=0.0)
    if largest == 0:
        return weights
    new = {name: min(max(a + step * signals[name] / largest, 0.0), 1.0) for name, a in weights.items()}
    before, after = sum(weights.values()), sum(new.values())
    return {name: a * before / after if after > 0 else weights[name] for name, a in new.items()}
