"""FedIIR: Guo et al., "Out-of-Distribution Generalization of Federated Learning via Implicit Invariant Relationships",
ICML 2023.

A classifier whose gradient is the same on every client relies on what holds on all of them. So each client keeps the
gradient of its classifier near the mean one of all. Before training, the round's clients compute the gradient of the
cross-entropy with respect to the classifier's parameters phi at the global model, batch by batch, and

    G <- ema G + (1 - ema) * mean over all batches of the round's clients of grad_phi CE        G = 0 at first
    L = CE + gamma ||grad_phi CE - G||^2

The penalty is differentiated through grad_phi CE, so it reaches the encoder too (a second-order term). The extra pass
normalises as training does and draws the training's augmentation. CE stands for the loss that the run trains on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedkeel.errors import MethodError
from fedkeel.methods import Batch, Expected, LocalClient, Method, Output, Server, Tensors, Traits, register
from fedkeel.nn.surgery import frozen_statistics
from fedkeel.options import Decay, NotNegative


@register("fediir")
@dataclass
class FedIIR(Method):
    """Keeps the gradient of each client's classifier near the mean over the clients."""

    paper = "Guo et al. 2023"
    traits = Traits(capturable=True)

    gamma: NotNegative = 1e-3  # weight of the penalty
    ema: Decay = 0.95  # share of the old in the server's mean gradient

    def prepare(self, model: nn.Module) -> Callable[[], None]:
        def check() -> None:  # afterwards: to see what head the other parts have left
            if not trained(model):
                raise MethodError("'fediir' acts on the gradient of the classifier, and none of its parameters trains.")

        return check

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        if not question:
            return {}
        gradients = {name: Expected.like("", parameter) for name, parameter in trained(server.network).items()}
        return gradients | {"batches": Expected((), torch.float64, least=1)}

    def before_training(self, server: Server) -> None:
        answers = [answer.tensors for answer in server.ask(server.participants, "gradient").values()]
        batches = sum(float(tensors.pop("batches")) for tensors in answers)
        new: Tensors = {}
        for name in answers[0] if answers else ():
            mean = torch.stack([tensors[name] for tensors in answers]).sum(dim=0) / batches
            new[name] = self.ema * server.extras.get(name, torch.zeros_like(mean)) + (1 - self.ema) * mean
        server.extras = new or server.extras

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        """The sum of the batches' gradients of the classifier, and how many batches there are."""
        model, parameters = client.model.train(), trained(client.model)
        total, count = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()}, 0
        for x, y in client.data.passes(client.config.batch_size, augment=True, shuffle=True):
            with frozen_statistics({} if len(y) > 1 else model):  # a single sample has no batch statistics
                loss = client.task_loss(model(x).logits, y)
            gradients = torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
            total = {name: total[name] + new for name, new in zip(parameters, gradients, strict=True)}
            count += 1
        return total | {"batches": torch.tensor(count, dtype=torch.float64, device=client.device)}

    def start(self, client: LocalClient) -> None:
        parameters = trained(client.model)
        client.scratch["parameters"] = list(parameters.values())
        client.scratch["mean"] = [client.extras.get(name, torch.zeros_like(p)) for name, p in parameters.items()]

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor:
        task_loss = client.task_loss(output.logits, batch.y)
        parameters, means = client.scratch["parameters"], client.scratch["mean"]
        gradients = torch.autograd.grad(task_loss, parameters, create_graph=True, materialize_grads=True)
        differences = zip(gradients, means, strict=True)
        return self.gamma * torch.stack([(own - mean).square().sum() for own, mean in differences]).sum()


def trained(model: nn.Module) -> Tensors:
    """The classifier's parameters that train, by name."""
    return {name: p for name, p in model.get_submodule("head").named_parameters() if p.requires_grad}
