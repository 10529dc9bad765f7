"""FedTAN: Wang et al., "Why Batch Normalization Damage Federated Learning on Non-IID Data?", IEEE TNNLS 2023.

Batch norm makes a sample's gradient depend on the statistics of its batch, and where clients' batches differ, the mean
of their gradients is not the gradient of the mean loss. In the first local step of a round FedTAN makes it so: every
batch norm, one after another, normalises with the moments of all clients' batches together, and on the way back the
derivatives by those moments are averaged too. For layer l with inputs a_i on client i, of weight p_i:

    mu_l  = sum_i p_i mean(a_i)                         one exchange, under the moments of the layers before
    var_l = sum_i p_i mean((a_i - mu_l)^2)              one exchange
    dmu_l, dvar_l = sum_i p_i dL_i/d(mu_l, var_l)       one exchange, from the last layer to the first

and client i's step is along the gradient of L_i + sum_l dmu_l mean(a_i) + dvar_l mean((a_i - mu_l)^2), whose second
part is what its inputs do to the others through the moments. The mean of these steps is one step on the union of the
batches. Later steps are those of FedAvg.

So a round has 3 exchanges for each batch norm, before the one that trains. Clients here keep nothing between two
questions: each carries the model, and a client computes its first batch anew as far as the layer that is asked for.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from fedkeel.core.state import BatchNorm, batch_norms
from fedkeel.errors import MethodError
from fedkeel.formulas.aggregation import weighted_mean
from fedkeel.methods import Batch, Expected, LocalClient, Method, Output, Server, Tensors, Traits, Update, register
from fedkeel.nn.mixed_batch_norm import all_but_channels, per_channel, replaced_forward, update_momentum

log = logging.getLogger("fedkeel")
KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@register("fedtan")
class FedTAN(Method):
    """In the first step of a round, batch norm uses the moments of all clients' batches together, layer by layer."""

    paper = "Wang et al. 2023 (FedTAN)"
    traits = Traits(needs_batch_norm=True)

    def prepare(self, model: nn.Module) -> Callable[[], None]:
        def check() -> None:  # afterwards: to see what batch norm the others have left
            for name, norm in batch_norms(model).items():
                if type(norm) not in KINDS:
                    raise MethodError(
                        f"'fedtan' takes batch norm apart, and '{name}' is a {type(norm).__name__} with something of "
                        "its own: choose a model with plain batch norm."
                    )

        return check

    def before_training(self, server: Server) -> None:
        """Moments from the first layer to the last, their derivatives from the last to the first."""
        known: Tensors = {}
        layers = range(len(batch_norms(server.network)))
        for layer in layers:
            for moment in ("mean", "var"):
                known |= self._ask(server, f"{moment} {layer}", known)
        for layer in reversed(layers):
            known |= self._ask(server, f"derivatives {layer}", known)
        server.extras = known

    @staticmethod
    def _ask(server: Server, question: str, known: Tensors) -> Tensors:
        """The weighted mean of the answers."""
        answers = list(server.ask(server.participants, question, known).values())
        if not answers:
            raise MethodError(f"No client answered '{question}' of 'fedtan', which cannot go on without.")
        # In which order batch norms are called only a forward pass knows: a layer has as many channels as most say.
        sizes = [max(tensor.numel() for tensor in answer.tensors.values()) for answer in answers]
        usual = Counter(sizes).most_common(1)[0][0]
        for answer, size in zip(answers, sizes, strict=True):
            if size != usual:
                log.warning("Round %d: '%s' did not answer '%s', its answer is of %d channels instead of %d.",
                            server.round, answer.client, question, size, usual)  # fmt: skip
        answers = [answer for answer, size in zip(answers, sizes, strict=True) if size == usual]
        return weighted_mean([answer.tensors for answer in answers], [server.share(answer) for answer in answers])

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        what, _, layer = question.partition(" ")
        if what == "derivatives":
            return {f"dmean {layer}": Expected(("channels",)), f"dvar {layer}": Expected(("channels",))}
        return {question: Expected(("channels",), least=0 if what == "var" else None)} if question else {}

    def answer(self, client: LocalClient, question: str, tensors: Tensors) -> Tensors:
        what, _, number = question.partition(" ")
        layer, batch = int(number), client.data.first_batch()
        client.model.eval()  # without dropout, whose draws would be others at every question
        if what == "derivatives":
            return self._derivatives(client, batch, layer, tensors)
        with torch.no_grad(), layerwise(client.model, tensors, until=layer) as inputs, suppress(Reached):
            client.model(batch.x)
        if len(inputs) <= layer:
            raise MethodError("'fedtan' goes through batch norms one by one, and this model leaves some of them out.")
        a = inputs[layer]
        if what == "mean":
            return {question: a.mean(all_but_channels(a))}
        return {question: (a - per_channel(tensors[f"mean {layer}"], a)).square().mean(all_but_channels(a))}

    @staticmethod
    def _derivatives(client: LocalClient, batch: Batch, layer: int, tensors: Tensors) -> Tensors:
        leaves = [tensors[f"{moment} {layer}"].clone().requires_grad_() for moment in ("mean", "var")]
        moments = tensors | {f"mean {layer}": leaves[0], f"var {layer}": leaves[1]}
        with torch.enable_grad(), layerwise(client.model, moments) as inputs:
            loss = client.task_loss(client.model(batch.x).logits, batch.y)
            loss = loss + through_moments(inputs, tensors, first=layer + 1)
            by_mean, by_var = torch.autograd.grad(loss, leaves)
        return {f"dmean {layer}": by_mean, f"dvar {layer}": by_var}

    def start(self, client: LocalClient) -> None:
        client.scratch["first"] = True

    def forward(self, client: LocalClient, x: Tensor) -> Output:
        if not client.scratch["first"]:
            return super().forward(client, x)
        with layerwise(client.model, client.extras, update=True) as inputs:
            output = super().forward(client, x)
        client.scratch["inputs"] = inputs
        return output

    def loss(self, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        if not client.scratch["first"]:
            return 0.0
        client.scratch["first"] = False
        term = through_moments(client.scratch.pop("inputs"), client.extras)
        return term - term.detach()  # it has a gradient; it is no loss

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        return {}


class Reached(Exception):
    """The layer that was asked for; what comes after it is not needed."""


@contextmanager
def layerwise(
    model: nn.Module, moments: Tensors, *, until: int | None = None, update: bool = False
) -> Iterator[list[Tensor]]:
    """Inside, the k-th batch norm that is called normalises with "mean k" and "var k"; yields the list of their inputs.

    `until`: stop the forward with `Reached` at that batch norm. `update`: move running statistics to the moments.
    """
    inputs: list[Tensor] = []
    called: set[str] = set()

    def normalise(name: str, norm: BatchNorm, x: Tensor) -> Tensor:
        k = len(inputs)
        if name in called:
            raise MethodError("'fedtan' goes through batch norms one by one, and this model calls one of them twice.")
        called.add(name)
        inputs.append(x)
        if k == until:
            raise Reached
        mean, var = moments[f"mean {k}"], moments[f"var {k}"]
        if update and norm.running_mean is not None and norm.running_var is not None:
            share, count = update_momentum(norm), x.numel() // x.shape[1]
            norm.running_mean.lerp_(mean, share)
            norm.running_var.lerp_(var * count / max(count - 1, 1), share)  # without bias, as batch norm does
        scale = torch.rsqrt(var + norm.eps) * (1 if norm.weight is None else norm.weight)
        y = (x - per_channel(mean, x)) * per_channel(scale, x)
        return y if norm.bias is None else y + per_channel(norm.bias, x)

    with replaced_forward(batch_norms(model), normalise):
        yield inputs


def through_moments(inputs: Sequence[Tensor], known: Tensors, first: int = 0) -> Tensor:
    """sum_l dmu_l mean(a_l) + dvar_l mean((a_l - mu_l)^2) over the layers from `first` on."""
    total = torch.zeros((), device=inputs[0].device)
    for layer, a in list(enumerate(inputs))[first:]:
        centred = a - per_channel(known[f"mean {layer}"], a)
        total = total + (known[f"dmean {layer}"] * a.mean(all_but_channels(a))).sum()
        total = total + (known[f"dvar {layer}"] * centred.square().mean(all_but_channels(a))).sum()
    return total
