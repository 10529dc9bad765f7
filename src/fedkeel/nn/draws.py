"""Random numbers that a step can draw inside a CUDA graph, and that are the same on every device; and dropout by them.

A generator of the host cannot be asked inside a graph, and torch's own on the GPU gives other numbers than the one on
the CPU; it is also one for each device, so that clients that run side by side would share it. So the numbers are a
function of a key and a counter, both tensors (counter-based generation: Salmon et al., "Parallel Random Numbers: As
Easy as 1, 2, 3", SC 2011): a hash of integers, exact everywhere. The key comes from a generator of the host before the
round; the counter is advanced on the device, once a step or once a draw. A mask belongs to the positions of its tensor,
however that lies in memory.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedkeel.errors import FedkeelError

HOLDER = "dropout_draws"  # the name of the `Draws` in a model; it adds nothing to `state_dict()`
_BITS = 23  # of a uniform number: with half a step added it is exact in float32, and neither 0 nor 1
_WORD = 0xFFFFFFFF
_MULTIPLIER = 0x45D9F3B
"""Folding and multiplying twice by this constant mixes 32 bits well, and its product with 32 bits fits 63."""
_GOLDEN = 0x1E3779B1


def new_key(generator: torch.Generator) -> Tensor:
    """A key from a generator of the host, on the CPU: int64, scalar."""
    return torch.randint(0, 2**31, (), generator=generator)


def mixed_keys(key: Tensor, counter: Tensor) -> Tensor:
    """A key for each number of `counter`, of its shape, from one key."""
    return _mixed(_mixed(key & _WORD) ^ ((counter * _GOLDEN) & _WORD))


def uniform(key: Tensor, counter: Tensor, count: int) -> Tensor:
    """Numbers between 0 and 1, neither included: (count,), float32, the same for the same key and counter.

    Args:
        key, counter: int64, scalars, on the device of the result.

    >>> key, counter = torch.tensor(7), torch.tensor(0)
    >>> torch.equal(uniform(key, counter, 3), uniform(key, counter, 5)[:3])
    True
    >>> torch.equal(uniform(key, counter, 3), uniform(key, counter + 1, 3))
    False
    """
    bits = _mixed(mixed_keys(key, counter) ^ _mixed(torch.arange(1, count + 1, device=key.device)))
    numbers: Tensor = ((bits >> (32 - _BITS)).float() + 0.5) / 2**_BITS
    return numbers


def normal(key: Tensor, counter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Standard normal numbers by Box and Muller's formula: float32, equal on all devices up to rounding."""
    first, second = uniform(key, counter, 2 * math.prod(shape)).view(2, *shape)
    numbers: Tensor = (-2 * first.log()).sqrt() * (2 * math.pi * second).cos()
    return numbers


def _mixed(x: Tensor) -> Tensor:
    """A one-to-one map of 32 bits, held in int64, after which each depends on all."""
    for _ in range(2):
        x = (x ^ (x >> 16)).mul_(_MULTIPLIER).bitwise_and_(_WORD)
    return x ^ (x >> 16)


class Draws(nn.Module):
    """The key of a client and the number of draws so far: what all masks of one model come from.

    Both lie in the model, on its device: a captured step finds them where they were, and draws anew at every replay.
    Layers that draw by themselves derive from it.
    """

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

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """The next numbers between 0 and 1: float32, of the given shape."""
        return self._next(uniform, math.prod(shape)).view(shape)

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """The next standard normal numbers: float32, of the given shape."""
        return self._next(normal, shape)

    def keep(self, shape: tuple[int, ...], p: float) -> Tensor:
        """Which entries stay, each with probability 1 - p: bool, of the given shape."""
        return self.uniform(shape) >= p

    def of_samples(self, count: int) -> dict[str, Tensor]:
        """Key and counter for each of `count` samples that go through the model one by one, by their names in it."""
        keys = mixed_keys(self.key, self.counter + torch.arange(count, device=self.key.device))
        self.counter.add_(count)
        return {f"{HOLDER}.key": keys, f"{HOLDER}.counter": torch.zeros_like(keys)}

    # The compiler would compute masks again in the backward pass, from a counter that has gone on. It is not
    # `torch.compiler.disable`, which imports the compiler at once.
    @torch._disable_dynamo  # type: ignore[attr-defined]
    def _next(self, numbers: Callable[[Tensor, Tensor, Any], Tensor], size: Any) -> Tensor:
        if torch._C._current_graph_task_id() != -1:
            raise FedkeelError(
                "A dropout layer runs again during the backward pass, where its mask would be another one: switch "
                "gradient checkpointing off."
            )
        drawn = numbers(self.key, self.counter, size)
        self.counter.add_(1)
        return drawn


def dropped(x: Tensor, keep: Tensor, p: float, inplace: bool = False) -> Tensor:
    """x where `keep` says so, divided by 1 - p, and zero elsewhere.

    >>> dropped(torch.ones(3), torch.tensor([True, False, True]), p=0.5)
    tensor([2., 0., 2.])
    """
    scale = 1 / (1 - p) if p < 1 else 1.0
    return x.mul_(keep).mul_(scale) if inplace else x * keep * scale
