"""FedTAN: Wang et al., "Why Batch Normalization Damage Federated Learning on Non-IID Data?", IEEE TNNLS 2023.

Where clients' batches differ, batch norm makes the mean of their gradients another than the gradient of the mean loss.
So the first local step of a round is one on the union of the batches: batch norm l, with inputs a_i on client i of
weight p_i, uses the moments of all clients, and the derivatives by these are averaged too. Clients are asked for each
as often as there are layers: an answer is of all of them, and right for one more each time. Later steps are FedAvg's.

    mu_l = sum_i p_i mean(a_i),   var_l = sum_i p_i mean((a_i - mu_l)^2)     from the first layer to the last
    dmu_l, dvar_l = sum_i p_i dL_i/d(mu_l, var_l)                            from the last layer to the first
    client i's step: along the gradient of L_i + sum_l dmu_l mean(a_i) + dvar_l mean((a_i - mu_l)^2)
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedkeel.core.state import BatchNorm, batch_norms
from fedkeel.errors import MethodError
from fedkeel.formulas.aggregation import weighted_mean
from fedkeel.methods import Batch, Expected, LocalClient, Method, Output, Server, Tensors, Traits, Update, register
from fedkeel.nn.mixed_batch_norm import all_but_channels, per_channel, plain_forward, replaced_forward, update_momentum


@register("fedtan")
class FedTAN(Method):
    """In the first step of a round, batch norm uses the moments of all clients' batches together, layer by layer."""

    paper = "Wang et al. 2023 (FedTAN)"
    traits = Traits(needs_batch_norm=True)

    def before_training(self, server: Server) -> None:
        layers, known = len(batch_norms(server.network)), Tensors()
        for question in [*["mean", "var"] * layers, *["derivatives"] * layers]:
            if not (answers := server.ask(server.participants, question, known).values()):
                raise MethodError(f"No client answered '{question}' of 'fedtan', which cannot go on without.")
            known |= weighted_mean([answer.tensors for answer in answers], [server.share(a) for a in answers])
        server.extras = known

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        x, y = client.data.first_batch()
        client.model.eval()  # without dropout, whose draws would be others at every question
        if question == "derivatives":
            leaves = {name: t.clone().requires_grad_() for name, t in tensors.items() if not name.startswith("d")}
            output, own = layerwise(client.model, x, tensors | leaves)
            loss = client.task_loss(output.logits, y) + through_moments(own, tensors)
            derivatives = torch.autograd.grad(loss, list(leaves.values()))
            return {f"d{name}": derivative for name, derivative in zip(leaves, derivatives, strict=True)}
        with torch.no_grad():
            _, own = layerwise(client.model, x, tensors)
        return {name: tensor for name, tensor in own.items() if name.startswith(question)}

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        kinds = {"": (), "derivatives": ("dmean", "dvar")}.get(question, (question,))
        least, layers = 0 if question == "var" else None, batch_norms(server.network).items()
        return {
            f"{kind} {name}": Expected((norm.num_features,), least=least) for kind in kinds for name, norm in layers
        }

    def forward(self, client: LocalClient, x: Tensor) -> Output:
        if not client.extras:  # after the first step
            return super().forward(client, x)
        output, client.scratch["own"] = layerwise(client.model, x, client.extras)
        return output

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        if not client.extras:
            return 0.0
        term, client.extras = through_moments(client.scratch.pop("own"), client.extras), {}
        return term - term.detach()  # it has a gradient; it is no loss

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        return {}


def layerwise(model: nn.Module, x: Tensor, moments: Tensors) -> tuple[Output, dict[str, Tensor]]:
    """The output, of batch norms under the known moments; and mean(a), where mu is known mean((a - mu)^2), of each."""
    norms, inputs = batch_norms(model), list[tuple[str, Tensor]]()

    def normalise(name: str, norm: BatchNorm, x: Tensor) -> Tensor:
        inputs.append((name, x))
        if f"var {name}" not in moments:
            return plain_forward(norm, x)
        mean, var = moments[f"mean {name}"], moments[f"var {name}"]
        if norm.training and norm.running_mean is not None and norm.running_var is not None:
            share, count = update_momentum(norm), x.numel() // x.shape[1]
            norm.running_mean.lerp_(mean, share)
            norm.running_var.lerp_(var * count / max(count - 1, 1), share)  # without bias, as batch norm does
        scale = torch.rsqrt(var + norm.eps) * (1 if norm.weight is None else norm.weight)
        y = (x - per_channel(mean, x)) * per_channel(scale, x)
        return y if norm.bias is None else y + per_channel(norm.bias, x)

    with replaced_forward(norms, normalise):
        output: Output = model(x)
    if sorted(name for name, _ in inputs) != sorted(norms):
        raise MethodError("'fedtan' wants each batch norm to be called once, and this model does otherwise.")
    own: Tensors = {}
    for name, a in inputs:
        own[f"mean {name}"] = a.mean(all_but_channels(a))
        if (mu := moments.get(f"mean {name}")) is not None:
            own[f"var {name}"] = (a - per_channel(mu.detach(), a)).square().mean(all_but_channels(a))
    return output, own


def through_moments(own: Tensors, known: Tensors) -> Tensor:
    """sum_l dmu_l mean(a_l) + dvar_l mean((a_l - mu_l)^2) over the layers whose derivatives are known."""
    terms = [(known[f"d{name}"] * value).sum() for name, value in own.items() if f"d{name}" in known]
    return sum(terms, torch.zeros(()).to(next(iter(own.values()))))
