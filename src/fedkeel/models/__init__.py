"""The networks of the papers, networks of timm, and `wrap` for any other. Every model returns `Output`."""

import math
from collections.abc import Sequence
from typing import Annotated, Any

from fedkeel.core.types import Classifier, Output
from fedkeel.errors import FedkeelError
from fedkeel.models import timm_models
from fedkeel.models.checkpoint import load_weights
from fedkeel.models.encoder import MODELS, Encoder, ImageSize, classify, height_width, network
from fedkeel.models.wrapped import wrap
from fedkeel.options import Count, Range, checked
from fedkeel.registry import discover
from fedkeel.spec import parse

__all__ = ["MODELS", "Classifier", "Encoder", "Output", "build", "load_weights", "network", "wrap"]


def build(
    name: str, *, num_classes: int, in_channels: int = 3, image_size: ImageSize | None = None, **options: Any
) -> Classifier:
    """A new model by name: one of `MODELS`, or `timm:NAME`.

    `image_size` is needed by networks that flatten their feature map (None: the size of the paper).

    >>> from fedkeel import models
    >>> models.build("simple_cnn", num_classes=10, image_size=32).feature_dim
    128
    """
    checked(num_classes, Annotated[int, Range(2)], "'num_classes'")
    checked(in_channels, Count, "'in_channels'")
    image_size = None if image_size is None else height_width(image_size)
    if isinstance(name, str) and name not in MODELS:
        projector = options.pop("projector", None)
        encoder = timm_models.encoder(name, in_channels, image_size, **options)
        return classify(encoder, num_classes, projector)
    return MODELS.make(name, num_classes=num_classes, in_channels=in_channels, image_size=image_size, **options)


def build_spec(text: str, *, num_classes: int, in_channels: int = 3, image_size: ImageSize | None = None) -> Classifier:
    """A new model from a name with options, as typed: `resnet18(stem=small, projector=512)`."""
    spec = parse(text)
    given = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
    for option in given.keys() & spec.options.keys():
        raise FedkeelError(f"'{text}' gives {option}, which follows from the data: leave it out.")
    return build(spec.name, num_classes=num_classes, in_channels=in_channels, image_size=image_size, **spec.options)


def build_for(text: str, num_classes: int, shape: Sequence[int]) -> Classifier:
    """The same for samples of this shape: (channels, height, width) of images, (numbers,) of vectors."""
    if len(shape) == 3:
        return build_spec(text, num_classes=num_classes, in_channels=shape[0], image_size=(shape[1], shape[2]))
    return build_spec(text, num_classes=num_classes, in_channels=math.prod(shape))


discover(__name__)
