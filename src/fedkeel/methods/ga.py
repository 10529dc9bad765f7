"""GA: Zhang et al., "Federated Domain Generalization with Generalization Adjustment", CVPR 2023 (FedDG-GA).

A client on whose data the global model is worse than the client's own counts for too little. So its weight in the mean
grows, and that of clients which the mean helps shrinks. With s the accuracy on client k's validation data (on training
data where it has none), after each round t of T, with step size d and K clients:

    g_k = s_k(local model after training) - s_k(global model after aggregation)         the generalisation gap
    a_k <- clip(a_k + d (1 - t/T) / K * g_k / max_j |g_j|, 0, 1),  then normalised      a_k = 1/K in the first round

The gaps of a round are asked for at the start of the next, when the aggregated model is what the server has. Under
partial participation a_k of the others stays, and so does the sum over those that took part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedkeel.methods import Expected, LocalClient, Method, Server, Tensors, Traits, Update, register
from fedkeel.options import Share


@register("ga")
@dataclass
class GA(Method):
    """Raises the weight of clients on whose data the global model is worse than their own."""

    paper = "Zhang et al. 2023"
    traits = Traits(replaces={"shares"})

    step_size: Share = 0.2  # d

    @torch.no_grad()
    def finish(self, client: LocalClient) -> Tensors:
        """The accuracy on the client's validation data, or on its training data where it has none."""
        training, size = client.model.training, client.config.evaluation_batch
        client.model.eval()
        right, samples = torch.zeros((), dtype=torch.float64, device=client.device), 0
        for batches in (client.data.validation(size), client.data.passes(size)):
            for batch in batches:
                right += (client.model(batch.x).logits.argmax(1) == batch.y).sum()
                samples += len(batch.y)
            if samples:
                break
        client.model.train(training)
        return {"score": right / samples}

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        return self.finish(client)

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        return {"score": Expected((), torch.float64, least=0, most=1)}

    def before_training(self, server: Server) -> None:
        """The last round's clients tell how the model that was made of theirs does, and their weights follow."""
        weights, local = server.noted("weight"), server.noted("local")
        if local:
            answers = server.ask(list(local), "score")
            gaps = {name: local[name] - float(answer.tensors["score"]) for name, answer in answers.items()}
            step = self.step_size * (1 - (server.round - 1) / server.rounds) / server.num_clients
            old = {name: weights.get(name, 1 / server.num_clients) for name in gaps}
            weights |= adjusted(old, gaps, step)
        server.memory = {}
        server.note("weight", weights)
        server.shares = {name: weights.get(name, 1 / server.num_clients) for name in server.participants}

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        """Nothing to send: remember how the local models did, until the global one is measured."""
        server.note("local", {update.client: float(update.extras["score"]) for update in updates})
        return {}


def adjusted(weights: dict[str, float], gaps: dict[str, float], step: float) -> dict[str, float]:
    """The clients' new weights from their gaps; their sum stays."""
    largest = max((abs(gap) for gap in gaps.values()), default=0.0)
    if largest == 0:
        return weights
    new = {name: min(max(a + step * gaps[name] / largest, 0.0), 1.0) for name, a in weights.items()}
    before, after = sum(weights.values()), sum(new.values())
    return {name: a * before / after if after > 0 else weights[name] for name, a in new.items()}
