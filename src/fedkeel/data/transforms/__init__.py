"""Transforms of batches of images, on any device: a file in this folder registers its own.

Each one works on a whole float batch (N, C, H, W) with values in [0, 1], and takes its randomness from outside: `u`,
uniform numbers of shape (N, draws). None asks the host anything, so all can be captured in a CUDA graph.

    parse_transforms("crop(padding=4)+flip+normalise(mean=0.5, std=0.5)")
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from fedkeel import spec
from fedkeel.data.federation import Transform
from fedkeel.errors import FedkeelError
from fedkeel.registry import Registry, discover

TRANSFORMS: Registry[Transform] = Registry("transform")
"""The transforms by name."""


@dataclass(frozen=True)
class Pipeline:
    """Transforms one after another; a uint8 batch first becomes float32 in [0, 1].

    >>> Pipeline()(torch.tensor([[[[0, 255]]]], dtype=torch.uint8), torch.empty(1, 0))
    tensor([[[[0., 1.]]]])
    """

    transforms: tuple[Transform, ...] = ()

    @property
    def draws(self) -> int:
        return sum(transform.draws for transform in self.transforms)

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            x = x.to(torch.float32).div_(255)
        start = 0
        for transform in self.transforms:
            x = transform(x, u[:, start : start + transform.draws])
            start += transform.draws
        return x


def parse_transforms(text: str) -> Pipeline:
    """A pipeline from its text: transforms joined by `+`; the empty text only converts to float.

    >>> parse_transforms("crop(padding=4)+flip").draws
    3
    """
    if not text.strip():
        return Pipeline()
    return Pipeline(tuple(TRANSFORMS.make(part.name, **part.options) for part in spec.parse_sum(text)))


@dataclass(frozen=True)
class Unknown(Pipeline):
    """Stands for a transform of which nothing is left but what it made of an image: its result is taken as it is."""


def transforms_text(transform: Transform) -> str | None:
    """The text that `parse_transforms` makes this very transform of; None for what cannot be written so."""
    if type(transform) is not Pipeline:
        return None
    names: dict[Any, str] = {entry.build: entry.name for entry in TRANSFORMS}
    if not all(type(part) in names and is_dataclass(part) for part in transform.transforms):
        return None
    parts: list[Any] = list(transform.transforms)
    text = "+".join(
        str(spec.Spec(names[type(p)], {f.name: typed(getattr(p, f.name)) for f in fields(p)})) for p in parts
    )
    try:
        return text if parse_transforms(text) == transform else None
    except FedkeelError:
        return None


def typed(value: Any) -> Any:
    """As people type it: rotation(degrees=30)."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


discover(__name__)
