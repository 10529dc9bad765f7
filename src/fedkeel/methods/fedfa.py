"""FedFA: Zhou and Konukoglu, "FedFA: Federated Feature Augmentation", ICLR 2023.

What a site's images look like shows in the statistics of its feature maps: the mean and deviation of each channel. So
training draws them anew around their own values, wider in the channels in which the sites differ, and the network meets
looks that are not in its own data (`nn.feature_augmentation` has the formulas). Each client keeps moving averages of
its statistics and sends them with its update; the server sends back their variance over the clients,

    s_c = 1/K sum_k (m_kc - 1/K sum_i m_ic)^2        for each channel, of the means and of the deviations.

The released code takes one variance over clients and channels together; then gamma is 1 in every channel, whatever the
clients say (`variance="scalar"`). It also averages the moving averages themselves: here they stay the client's own, and
only one without starts from the mean of the others' (in a stateless federation: everyone, in every round). They are
updated in every step, not only in those that augment, and begin with the first batch instead of 0 and 1: otherwise
clients would differ by how many steps they made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedkeel.core.client import LocalClient
from fedkeel.core.messages import Expected, Update
from fedkeel.core.method import Method, Traits
from fedkeel.core.server import Server
from fedkeel.core.state import Tensors
from fedkeel.errors import FedkeelError, nearest
from fedkeel.methods import register
from fedkeel.nn.draws import new_key
from fedkeel.nn.feature_augmentation import FeatureAugmentation, augment_features

VARIANCES = ("channel", "scalar")


@register("fedfa")
class FedFA(Method):
    """Draws the channel statistics of feature maps anew in training, wider where clients differ."""

    paper = "Zhou and Konukoglu 2023 (FedFA)"
    traits = Traits(capturable=True, surgery_order=2)

    def __init__(self, p: float = 0.5, momentum: float = 0.99, variance: str = "channel") -> None:
        """`p`: probability that a layer acts in a step. `momentum`: share of the old in the moving averages.
        `variance`: over the clients for each "channel", or one "scalar" over all of a layer's, as in the released code.
        """
        if variance not in VARIANCES:
            raise FedkeelError(f"The 'variance' of fedfa is '{variance}': {nearest(str(variance), VARIANCES)}")
        for option, share in (("p", p), ("momentum", momentum)):
            if not 0 <= share <= 1:
                raise FedkeelError(f"The '{option}' of fedfa is {share}: give a number from 0 to 1.")
        self.p, self.momentum, self.variance = p, momentum, variance
        self._channels: list[int] = []

    def prepare(self, model: nn.Module) -> None:
        self._channels = [layer.channels for layer in layers_of(augment_features(model, self.p, self.momentum))]

    # -- on the client ---------------------------------------------------------------------------------------
    @torch.no_grad()
    def start(self, client: LocalClient) -> None:
        layers = layers_of(client.model.get_submodule("feature_augmentation"))
        client.scratch["layers"] = layers
        generator = client.generator("fedfa")
        for layer in layers:
            layer.key.copy_(new_key(generator))
        own = client.memory or client.extras
        if own:
            self._fill([layer.running_mean for layer in layers], own["mean"])
            self._fill([layer.running_std for layer in layers], own["std"])
            for layer in layers:
                layer.keep.fill_(self.momentum)
        if client.extras:
            self._fill([layer.mean_variance for layer in layers], client.extras["mean_variance"])
            self._fill([layer.std_variance for layer in layers], client.extras["std_variance"])

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

    def _fill(self, buffers: list[Tensor], values: Tensor) -> None:
        torch._foreach_copy_(buffers, list(torch.split_with_sizes(values, self._channels)))

    # -- on the server ---------------------------------------------------------------------------------------
    def expects(self, server: Server, question: str = "") -> Mapping[str, Expected] | None:
        channels = sum(self._channels)
        return {"mean": Expected((channels,)), "std": Expected((channels,), least=0)}

    def extras(self, server: Server, updates: Sequence[Update]) -> Tensors:
        new: Tensors = {}
        for name in ("mean", "std"):
            stacked = torch.stack([update.extras[name] for update in updates])  # (K, channels of all layers)
            new[name] = stacked.mean(dim=0)
            new[f"{name}_variance"] = self._over_clients(stacked)
        return new

    def _over_clients(self, stacked: Tensor) -> Tensor:
        if self.variance == "channel":
            return stacked.var(dim=0, correction=0)
        parts = torch.split_with_sizes(stacked, self._channels, dim=1)
        return torch.cat([part.var(correction=0).expand(part.shape[1]) for part in parts])


def layers_of(group: nn.Module) -> list[FeatureAugmentation]:
    return [layer for layer in group.children() if isinstance(layer, FeatureAugmentation)]
