"""SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
Algorithm 1 (option II) and Eqs. 3-5.

Local steps drift to the optimum of the client's own data. Each client keeps an estimate c_i of its gradient (its
control variate), the server keeps the mean c of them all, and every local step is corrected by the difference:

    y_i <- y_i - lr (g_i(y_i) - c_i + c)                                                                 (Eq. 3)
    c_i+ = c_i - c + (x - y_i) / (K lr)                      the mean gradient of the K steps            (Eq. 4)
    x <- mean_i y_i,    c <- c + 1/N sum_{i in S} (c_i+ - c_i)                                           (Eq. 5)

Everything starts from zero, and only weights are corrected: a running mean has no gradient. Eq. 4 divides by how far K
steps of a constant gradient go. With momentum m that is not K lr but lr sum_k b_k with b_k = m b_{k-1} + 1.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fedkeel.core import state
from fedkeel.errors import MethodError
from fedkeel.methods import Expected, LocalClient, Method, Server, Tensors, Traits, Update, register


@register("scaffold")
class Scaffold(Method):
    """Corrects every local step by the difference between the mean gradient of all clients and the client's own."""

    paper = "Karimireddy et al. 2020"
    traits = Traits(private={"central"}, needs_memory=True, capturable=True)

    def before_training(self, server: Server) -> None:
        need_sgd(server, "scaffold")

    def start(self, client: LocalClient) -> None:
        parameters = dict(client.model.named_parameters())
        names = [name for name in client.broadcast.weights if name in parameters and parameters[name].requires_grad]
        weights = [parameters[name] for name in names]
        zeros = [torch.zeros_like(weight, requires_grad=False) for weight in weights]
        own = [client.memory.get(name, zero) for name, zero in zip(names, zeros, strict=True)]
        mean = [client.extras.get(name, zero) for name, zero in zip(names, zeros, strict=True)]
        client.scratch["names"], client.scratch["weights"] = names, weights
        client.scratch["correction"] = list(torch._foreach_sub(mean, own))  # c - c_i
        begin_counting(client)

    def gradients(self, client: LocalClient, recompute: Callable[[], Tensor]) -> None:
        """Eq. 3."""
        pairs = zip(client.scratch["weights"], client.scratch["correction"], strict=True)
        used = [(weight.grad, correction) for weight, correction in pairs if weight.grad is not None]
        torch._foreach_add_([gradient for gradient, _ in used], [correction for _, correction in used])
        count_step(client)

    @torch.no_grad()
    def finish(self, client: LocalClient) -> Tensors:
        """Eq. 4. What goes up is how the control variate changed."""
        names = client.scratch["names"]
        moved = torch._foreach_sub([client.broadcast.weights[name] for name in names], client.scratch["weights"])
        torch._foreach_div_(moved, client.scratch["steps"] * client.learning_rate)
        new = torch._foreach_sub(moved, client.scratch["correction"])
        old, client.memory = client.memory, dict(zip(names, new, strict=True))
        return {name: tensor - old[name] if name in old else tensor for name, tensor in client.memory.items()}

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        trained = {name for name, parameter in server.network.named_parameters() if parameter.requires_grad}
        return {name: Expected.like("", weight) for name, weight in server.weights.items() if name in trained}

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        """Eq. 5: the mean over all N clients, weighted as the weights are; those never seen count with zero."""
        server.note("share", {update.client: server.share(update) for update in updates})
        for update in updates:
            for name, change in state.prefixed(update.extras, "sum").items():
                server.memory[name] = server.memory.get(name, 0) + server.share(update) * change
        shares = server.noted("share").values()
        # How many samples clients have that never came is not known: as many as those that did, on average.
        total = server.num_clients * sum(shares) / len(shares)
        return {name: tensor / total for name, tensor in state.select(server.memory, "sum").items()}


def need_sgd(server: Server, name: str) -> None:
    if server.config.optimizer != "sgd":
        raise MethodError(f"'{name}' takes steps of SGD, and the optimiser is '{server.config.optimizer}': choose sgd.")


def begin_counting(client: LocalClient) -> None:
    """b_k and its sum, as tensors: the number of steps is counted where they are taken."""
    client.scratch["step"], client.scratch["steps"] = torch.zeros(2, device=client.device).unbind()


def count_step(client: LocalClient) -> None:
    """b_k = m b_{k-1} + 1, added to the sum: how far so many steps of a constant gradient go, in units of lr."""
    client.scratch["step"].mul_(client.config.momentum).add_(1)
    client.scratch["steps"].add_(client.scratch["step"])
