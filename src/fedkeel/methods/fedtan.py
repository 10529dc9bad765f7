"""FedTAN: Wang et al., "Why Batch Normalization Damage Federated Learning on Non-IID Data?", IEEE TNNLS 2023.

Where clients' batches differ, batch norm makes the mean of their gradients another than the gradient of the mean loss.
So the first local step of a round is one on the union of the batches: batch norm l, with inputs a_i on client i of
weight p_i, uses the moments of all clients, and the derivatives by these are averaged too. Three exchanges for each:

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
from fedkeel.nn.mixed_batch_norm import all_but_channels, per_channel, replaced_forward, update_momentum


@register("fedtan")
class FedTAN(Method):
    """In the first step of a round, batch norm uses the moments of all clients' batches together, layer by layer."""

    paper = "Wang et al. 2023 (FedTAN)"
    traits = Traits(needs_batch_norm=True)

    def before_training(self, server: Server) -> None:
        layers, known = list(batch_norms(server.network)), Tensors()
        forth = [f"{moment} {layer}" for layer in layers for moment in ("mean", "var")]
        for question in [*forth, *(f"derivatives {layer}" for layer in reversed(layers))]:
            if not (answers := server.ask(server.participants, question, known).values()):
                raise MethodError(f"No client answered '{question}' of 'fedtan', which cannot go on without.")
            known |= weighted_mean([answer.tensors for answer in answers], [server.share(a) for a in answers])
        server.extras = known

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        what, _, layer = question.partition(" ")
        x, y = client.data.first_batch()
        client.model.eval()  # without dropout, whose draws would be others at every question
        if what == "derivatives":
            leaves = {name: tensors[name].clone().requires_grad_() for name in (f"mean {layer}", f"var {layer}")}
            output, inputs = layerwise(client.model, x, tensors | leaves)
            loss = client.task_loss(output.logits, y) + through_moments(inputs, tensors)
            gradients = torch.autograd.grad(loss, list(leaves.values()))
            return {f"d{name}": gradient for name, gradient in zip(leaves, gradients, strict=True)}
        with torch.no_grad():
            _, inputs = layerwise(client.model, x, tensors)
        if [name for name, _ in inputs] != list(batch_norms(client.model)):
            raise MethodError("'fedtan' wants batch norms that are called once each, in the order of their definition.")
        return {question: moment(what, layer, dict(inputs)[layer], tensors)}

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        what, _, layer = question.partition(" ")
        names = [f"dmean {layer}", f"dvar {layer}"] if what == "derivatives" else [question] if question else []
        norms, least = batch_norms(server.network), 0 if what == "var" else None
        return {name: Expected((norms[layer].num_features,), least=least) for name in names}

    def forward(self, client: LocalClient, x: Tensor) -> Output:
        if not client.extras:  # after the first step
            return super().forward(client, x)
        output, client.scratch["inputs"] = layerwise(client.model, x, client.extras)
        return output

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        if not client.extras:
            return 0.0
        term, client.extras = through_moments(client.scratch.pop("inputs"), client.extras), {}
        return term - term.detach()  # it has a gradient; it is no loss

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        return {}


def layerwise(model: nn.Module, x: Tensor, moments: Tensors) -> tuple[Output, list[tuple[str, Tensor]]]:
    """The model's output with batch norms that normalise with the moments known of them, and their inputs in order."""
    inputs: list[tuple[str, Tensor]] = []

    def normalise(name: str, norm: BatchNorm, x: Tensor) -> Tensor:
        inputs.append((name, x))
        if f"var {name}" not in moments:
            return x  # it is not asked what comes from here on
        mean, var = moments[f"mean {name}"], moments[f"var {name}"]
        if norm.training and norm.running_mean is not None and norm.running_var is not None:
            share, count = update_momentum(norm), x.numel() // x.shape[1]
            norm.running_mean.lerp_(mean, share)
            norm.running_var.lerp_(var * count / max(count - 1, 1), share)  # without bias, as batch norm does
        scale = torch.rsqrt(var + norm.eps) * (1 if norm.weight is None else norm.weight)
        y = (x - per_channel(mean, x)) * per_channel(scale, x)
        return y if norm.bias is None else y + per_channel(norm.bias, x)

    with replaced_forward(batch_norms(model), normalise):
        return model(x), inputs


def moment(what: str, layer: str, a: Tensor, known: Tensors) -> Tensor:
    """mean(a), or mean((a - mu)^2) for "var"."""
    a = (a - per_channel(known[f"mean {layer}"], a)).square() if what == "var" else a
    return a.mean(all_but_channels(a))


def through_moments(inputs: Sequence[tuple[str, Tensor]], known: Tensors) -> Tensor:
    """sum_l dmu_l mean(a_l) + dvar_l mean((a_l - mu_l)^2) over the layers whose derivatives are known."""
    pairs = [(what, layer, a) for layer, a in inputs for what in ("mean", "var") if f"dvar {layer}" in known]
    terms = [(known[f"d{what} {layer}"] * moment(what, layer, a, known)).sum() for what, layer, a in pairs]
    return sum(terms, torch.zeros((), device=inputs[0][1].device))
