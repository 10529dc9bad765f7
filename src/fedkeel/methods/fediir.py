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
from fedkeel.methods.scaffold import summed_gradients
from fedkeel.options import Decay, NotNegative

MOST_BATCHES = 2.0**40  # of a client: none has more


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
        if question != "gradient":
            return {}
        gradients = {name: Expected.like("", parameter) for name, parameter in trained(server.network).items()}
        return gradients | {"batches": Expected((), torch.float64, least=0, most=MOST_BATCHES)}

    def before_training(self, server: Server) -> None:
        answers = [answer.tensors for answer in server.ask(server.participants, "gradient").values()]
        answers = [tensors for tensors in answers if tensors.get("batches", torch.zeros(())) > 0]
        if not answers:
            return
        batches = sum(float(tensors["batches"]) for tensors in answers)
        new: Tensors = {}
        for name in [name for name in answers[0] if name != "batches"]:
            mean = torch.stack([tensors[name] for tensors in answers]).sum(dim=0) / batches
            new[name] = self.ema * server.extras.get(name, torch.zeros_like(mean)) + (1 - self.ema) * mean
        server.extras = new

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        """The sum of the batches' gradients of the classifier, and how many batches there are."""
        if question != "gradient":
            return super().answer(client, question, tensors)
        model, parameters = client.model.train(), trained(client.model)
        batches = client.data.passes(client.config.batch_size, augment=True, shuffle=True)
        total, count = summed_gradients(model, list(parameters.values()), batches, client.task_loss)
        number = torch.tensor(count, dtype=torch.float64, device=client.device)
        return dict(zip(parameters, total, strict=True)) | {"batches": number}

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
    head = model.head
    assert isinstance(head, nn.Module)
    return {name: parameter for name, parameter in head.named_parameters() if parameter.requires_grad}
