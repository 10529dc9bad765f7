"""Every random choice comes from a generator seeded by what it is for.

`generator(seed, "order", round, client)` gives the same numbers on every machine, whatever ran before it,
in whatever process. So a run does not depend on the executor, on the number of workers or on where it was
interrupted.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch


def derive(seed: int, *purpose: object) -> int:
    """A 63-bit seed from the run's seed and a purpose such as `("order", round, client)`."""
    text = "\x1f".join([str(seed), *map(str, purpose)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(seed: int, *purpose: object) -> torch.Generator:
    """A torch generator on the CPU for one purpose."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


def numpy_generator(seed: int, *purpose: object) -> np.random.Generator:
    """A NumPy generator for one purpose."""
    return np.random.default_rng(derive(seed, *purpose))


class Stream:
    """Random numbers that only who knows the key can draw again, for what must stay a secret.

    A torch generator on the CPU has 2^32 beginnings, which can all be tried, and shows its state after a few hundred
    numbers. Here they come from SHAKE-128 of the key, block by block.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._block = key, 0

    def uniform(self, *shape: int) -> torch.Tensor:
        """In [0, 1), float32."""
        return torch.from_numpy((self._words(math.prod(shape)) >> 8).astype(np.float32)).mul_(2.0**-24).view(shape)

    def normal(self, *shape: int) -> torch.Tensor:
        """Of mean 0 and variance 1, float32, two from each two words (Box and Muller 1958)."""
        count = math.prod(shape)
        half = (count + 1) // 2
        words = torch.from_numpy(self._words(2 * half).astype(np.float64)).add_(0.5).mul_(2.0**-32).float()
        radius, angle = words[:half].log_().mul_(-2).sqrt_(), words[half:].mul_(2 * math.pi)
        return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count].view(shape)

    def _words(self, count: int) -> npt.NDArray[np.uint32]:
        self._block += 1
        block = hashlib.shake_128(self._key + self._block.to_bytes(8, "big")).digest(4 * count)
        return np.frombuffer(block, dtype="<u4")


def sample(count: int, chosen: int, generator: torch.Generator) -> list[int]:
    """`chosen` different numbers below `count`."""
    numbers: list[int] = torch.randperm(count, generator=generator)[:chosen].tolist()
    return numbers


@contextmanager
def default_generator(seed: int, *purpose: object, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's default generators inside the block and put them back as they were after it.

    Initialisers, dropout and networks that call `torch.rand` draw from the default generator and take no other; this
    is the one place where it is touched.
    """
    cuda = device is not None and device.type == "cuda"
    devices = [device] if cuda else []
    with torch.random.fork_rng(devices=devices, enabled=True):
        torch.default_generator.manual_seed(derive(seed, *purpose))
        if cuda:
            torch.cuda.manual_seed(derive(seed, *purpose))
        yield
