"""What dropout draws from: masks of (seed, round, client, draw), on every device and inside CUDA graphs too.

torch's layers draw from its default generator, of which there is one for each device: clients that run side by side on
a GPU would share it, and their masks would depend on who came first. Here they are a hash (`nn.draws`) of a key, the
client's in this round, and a counter, of which each draw takes the next number, as from a generator. A mask belongs to
the positions of its tensor, however that lies in memory.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fedkeel.errors import FedkeelError
from fedkeel.nn.draws import mixed_keys, new_key, normal, uniform

HOLDER = "dropout_draws"  # the name of the `Draws` in a model; it adds nothing to `state_dict()`
_ALPHA = 1.7580993408473766  # minus the limit of SELU at minus infinity (Klambauer et al., NeurIPS 2017)


class Draws(nn.Module):
    """The key of a client and the number of draws so far: what all masks of one model come from."""

    key: Tensor
    counter: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("key", "counter"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Any) -> Any:
        return x  # in a model that calls its parts one after another

    def begin(self, generator: torch.Generator) -> None:
        """Masks from here on are those of this generator."""
        self.key.fill_(int(new_key(generator)))  # a copy from the host would wait for the GPU
        self.counter.zero_()

    # The compiler would compute masks again in the backward pass, from a counter that has gone on. It is not
    # `torch.compiler.disable`, which imports the compiler at once.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """The next numbers between 0 and 1: float32, of the given shape."""
        self._refuse_recomputing()
        numbers = uniform(self.key, self.counter, math.prod(shape)).view(shape)
        self.counter.add_(1)
        return numbers

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """The next standard normal numbers: float32, of the given shape."""
        self._refuse_recomputing()
        numbers = normal(self.key, self.counter, shape)
        self.counter.add_(1)
        return numbers

    def keep(self, shape: tuple[int, ...], p: float) -> Tensor:
        """Which entries stay, each with probability 1 - p: bool, of the given shape."""
        return self.uniform(shape) >= p

    def of_samples(self, count: int) -> dict[str, Tensor]:
        """Key and counter for each of `count` samples that go through the model one by one, by their names in it."""
        keys = mixed_keys(self.key, self.counter + torch.arange(count, device=self.key.device))
        self.counter.add_(count)
        return {f"{HOLDER}.key": keys, f"{HOLDER}.counter": torch.zeros_like(keys)}

    @staticmethod
    def _refuse_recomputing() -> None:
        if torch._C._current_graph_task_id() != -1:
            raise FedkeelError(
                "A dropout layer runs again during the backward pass, where its mask would be another one: switch "
                "gradient checkpointing off."
            )


def dropped(x: Tensor, keep: Tensor, p: float, inplace: bool = False, scaled: bool = True) -> Tensor:
    """x where `keep` says so, divided by 1 - p, and zero elsewhere.

    >>> dropped(torch.ones(3), torch.tensor([True, False, True]), p=0.5)
    tensor([2., 0., 2.])
    """
    scale = 1 / (1 - p) if scaled and p < 1 else 1.0
    return x.mul_(keep).mul_(scale) if inplace else x * keep * scale


def alpha_dropped(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Entries that go take SELU's limit, and all are moved so that mean and variance stay (Klambauer et al. 2017)."""
    if p == 1:
        return x * keep
    scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
    return x * keep * scale + (p - (~keep).to(x.dtype)) * (_ALPHA * scale)


def whole_channels(x: Tensor, first: int) -> tuple[int, ...]:
    """The shape of a mask with one number for each place of the first dimensions."""
    return (*x.shape[:first], *[1] * (x.ndim - first))
