"""FedFA's layer: feature maps with channel statistics drawn around their own (Zhou and Konukoglu, ICLR 2023), and where
in a network it goes.

    mu, sigma            mean and deviation over the pixels, of each sample and channel
    V_mu = Var_b mu,  V_sigma = Var_b sigma                                     over the batch
    mu^ ~ N(mu, (1 + gamma_mu) V_mu),  sigma^ ~ N(sigma, (1 + gamma_sigma) V_sigma)
    x <- sigma^ (x - mu) / sigma + mu^                                          with probability p, in training

gamma is larger for channels in which the clients differ: with s the variance over the clients of their mean statistics,

    gamma_c = C g_c / sum_c' g_c',    g_c = 1 / (1 + 1 / s_c)

A layer takes its draws from `nn.draws`, once a step: every forward of a step (GReg's second one, that of a
sharpness-aware step) sees the same ones. Its buffers are not in `state_dict()`: what travels is the method's to say.
"""

import torch
from torch import Tensor, nn

from fedkeel.core.types import Classifier
from fedkeel.errors import MethodError
from fedkeel.formulas.similarity import precise
from fedkeel.nn.draws import Draws, normal, uniform
from fedkeel.nn.surgery import change_input, change_output

_CONSUMERS = (nn.Linear, nn.Flatten, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d)  # what follows the last block


class FeatureAugmentation(Draws):
    """Maps (N, C, ...), or flattened (N, C * pixels), with their channel statistics drawn anew; in training only.

    Buffers: `running_mean`, `running_std` (C,), moving averages of the batches' mean statistics, in which the old has
    the share `old`; `mean_variance`, `std_variance` (C,), the variances of these over the clients; `due`, whether this
    step's batch is not in the moving averages yet.
    """

    running_mean: Tensor
    running_std: Tensor
    mean_variance: Tensor
    std_variance: Tensor
    old: Tensor
    due: Tensor

    def __init__(self, channels: int, p: float = 0.5, momentum: float = 0.99, eps: float = 1e-6) -> None:
        super().__init__()
        self.channels, self.p, self.momentum, self.eps = channels, p, momentum, eps
        buffers = {name: torch.ones(channels) for name in ("running_std", "mean_variance", "std_variance")}
        buffers |= {"running_mean": torch.zeros(channels), "old": torch.zeros(()), "due": torch.zeros(())}
        for name, initial in buffers.items():
            self.register_buffer(name, initial, persistent=False)

    def next_step(self) -> None:
        """New draws, and a batch that the moving averages have not seen."""
        self.counter += 1
        self.due.fill_(1)

    def forward(self, x: Tensor) -> Tensor:
        maps = x.reshape(x.shape[0], self.channels, -1) if x.ndim == 2 and x.shape[1] % self.channels == 0 else x
        if maps.ndim < 3 or maps.shape[1] != self.channels:
            raise MethodError(
                f"'fedfa' expected maps of {self.channels} channels and met a tensor of shape {tuple(x.shape)}: "
                "its rule for where convolution blocks end does not fit this network."
            )
        if not self.training:
            return x
        wide = precise(maps)
        var, mean = torch.var_mean(wide, list(range(2, maps.ndim)), correction=0)
        std = (var + self.eps).sqrt()
        self._record(mean, std)
        if len(x) == 1:  # a single sample has no variance to draw from
            return x
        # sigma^ (x - mu) / sigma + mu^  =  x + (x - mu) (sigma^ - sigma) / sigma + (mu^ - mu): nothing large cancels
        # where sigma is tiny, and where the layer is off, both changes are 0 and x stays as it is, bit for bit.
        change_of_mean, change_of_std = self._changes(mean, std)
        each = (*mean.shape, *[1] * (maps.ndim - 2))
        drawn = maps + (wide - mean.view(each)) * (change_of_std / std).view(each) + change_of_mean.view(each)
        return drawn.to(x.dtype).view_as(x)

    def _changes(self, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """mu^ - mu and sigma^ - sigma, or zeros in the steps in which the layer is off: (N, C) each."""
        on = uniform(self.key, 2 * self.counter, 1) < self.p
        noise = normal(self.key, 2 * self.counter + 1, (2, *mean.shape)).to(mean.dtype).where(on, 0)
        of_mean, of_std = (
            ((1 + emphasis(over_clients, self.eps)) * (own.var(dim=0, correction=0) + self.eps)).sqrt()
            for own, over_clients in ((mean, self.mean_variance), (std, self.std_variance))
        )
        return of_mean * noise[0], of_std * noise[1]

    @torch.no_grad()
    def _record(self, mean: Tensor, std: Tensor) -> None:
        share = (1 - self.old) * self.due
        self.running_mean.lerp_(mean.mean(dim=0).to(self.running_mean.dtype), share)
        self.running_std.lerp_(std.mean(dim=0).to(self.running_std.dtype), share)
        self.old.fill_(self.momentum)
        self.due.zero_()


def emphasis(variance: Tensor, eps: float = 1e-6) -> Tensor:
    """gamma: how much more the channels are augmented in which clients differ more. (C,) -> (C,), of mean 1.

    >>> emphasis(torch.tensor([1.0, 1.0, 0.0]), eps=0.0)
    tensor([1.5000, 1.5000, 0.0000])
    """
    weight = 1 / (1 + 1 / (variance + eps))
    return len(variance) * weight / weight.sum()


def augment_features(model: nn.Module, p: float = 0.5, momentum: float = 0.99) -> nn.ModuleList:
    """Put a layer after each block of convolutions of the network; they are its `feature_augmentation` then.

    The blocks are the parts, one after another, of the outermost module that has several with convolutions in them:
    stem and stages of a ResNet, single convolutions of the CNNs with what belongs to them (normalisation, activation,
    pooling). A layer acts where the next block begins, and for the last one at its output, or before the pooling or
    the fully connected layer that follows.
    """
    layers = nn.ModuleList()
    for module, at_input, channels in _block_ends(model):
        layer = FeatureAugmentation(channels, p, momentum)
        (change_input if at_input else change_output)(module, layer)
        layers.append(layer)
    model.add_module("feature_augmentation", layers)
    return layers


def _block_ends(model: nn.Module) -> list[tuple[nn.Module, bool, int]]:
    """Where blocks end: at the input (or else at the output) of which module, with how many channels."""
    parent = model.encoder if isinstance(model, Classifier) else model
    blocks = _convolutional(parent)
    while len(blocks) == 1 and not isinstance(blocks[0], nn.Conv2d):
        parent, blocks = blocks[0], _convolutional(blocks[0])
    if not blocks:
        raise MethodError("'fedfa' augments the feature maps of convolutions: choose a convolutional model.")
    ends = [(block, True, _convolutions(block)[0].in_channels) for block in blocks[1:]]
    last, channels = blocks[-1], _convolutions(blocks[-1])[-1].out_channels
    if not isinstance(last, nn.Conv2d):
        return [*ends, (last, False, channels)]
    siblings = list(parent.children())
    following = siblings[siblings.index(last) + 1 :]
    consumer = next((module for module in following if isinstance(module, _CONSUMERS)), None)
    return [*ends, (parent, False, channels) if consumer is None else (consumer, True, channels)]


def _convolutional(module: nn.Module) -> list[nn.Module]:
    """Its parts that have convolutions."""
    return [child for child in module.children() if _convolutions(child)]


def _convolutions(module: nn.Module) -> list[nn.Conv2d]:
    return [part for part in module.modules() if isinstance(part, nn.Conv2d)]
