"""FedFA: Zhou and Konukoglu, "FedFA: Federated Feature Augmentation", ICLR 2023.

What a site's images look like shows in the mean and deviation of each channel of its feature maps. So training draws
them anew around their own values, wider in the channels in which the sites differ (`nn.feature_augmentation` has the
formulas). Each client sends moving averages of its statistics; the server sends back their variance over the clients,

    s_c = 1/K sum_k (m_kc - 1/K sum_i m_ic)^2        for each channel, of the means and of the deviations.

The averages stay the client's own; one without starts from the mean of the others'. They are updated in every step, and
begin with the first batch instead of 0 and 1: otherwise clients would differ by how many steps they made.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedkeel.methods import Expected, LocalClient, Method, Server, Tensors, Traits, Update, register
from fedkeel.nn.feature_augmentation import FeatureAugmentation, augment_features
from fedkeel.options import Share


@register("fedfa")
@dataclass
class FedFA(Method):
    """Draws the channel statistics of feature maps anew in training, wider where clients differ."""

    paper = "Zhou and Konukoglu 2023 (FedFA)"
    traits = Traits(capturable=True)

    p: Share = 0.5  # probability that a layer acts in a step
    momentum: Share = 0.99  # share of the old in the moving averages

    def prepare(self, model: nn.Module) -> Callable[[], object]:
        # afterwards: the others may still replace the modules that it hooks into
        return lambda: augment_features(model, self.p, self.momentum)

    @torch.no_grad()
    def start(self, client: LocalClient) -> None:
        layers = client.scratch["layers"] = layers_of(client.model)
        generator = client.generator("fedfa")
        for layer in layers:
            layer.begin(generator)
        own = client.memory or client.extras
        if own:
            fill([layer.running_mean for layer in layers], own["mean"])
            fill([layer.running_std for layer in layers], own["std"])
            for layer in layers:
                layer.old.fill_(self.momentum)
        if client.extras:
            fill([layer.mean_variance for layer in layers], client.extras["mean_variance"])
            fill([layer.std_variance for layer in layers], client.extras["std_variance"])

    def inputs(self, client: LocalClient, x: Tensor) -> Tensor:
        for layer in client.scratch["layers"]:
            layer.next_step()
        return x

    def finish(self, client: LocalClient) -> Tensors:
        layers = client.scratch["layers"]
        client.memory = {
            "mean": torch.cat([layer.running_mean for layer in layers]),
            "std": torch.cat([layer.running_std for layer in layers]),
        }
        return dict(client.memory)

    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        channels = sum(layer.channels for layer in layers_of(server.network))
        return {"mean": Expected((channels,)), "std": Expected((channels,), least=0)}

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        new: Tensors = {}
        for name in ("mean", "std"):
            stacked = torch.stack([update.extras[name] for update in updates])  # (K, channels of all layers)
            new[name], new[f"{name}_variance"] = stacked.mean(dim=0), stacked.var(dim=0, correction=0)
        return new


def layers_of(model: nn.Module) -> list[FeatureAugmentation]:
    return [layer for layer in model.modules() if isinstance(layer, FeatureAugmentation)]


def fill(buffers: list[Tensor], values: Tensor) -> None:
    torch._foreach_copy_(buffers, list(torch.split_with_sizes(values, [len(buffer) for buffer in buffers])))
