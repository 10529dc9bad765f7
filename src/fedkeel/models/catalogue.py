"""The networks by name: `build("resnet18", num_classes=10, stem="small")`, or as typed, `resnet18(stem=small)`."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from fedkeel.core.types import Classifier
from fedkeel.errors import FedkeelError
from fedkeel.models import timm_models
from fedkeel.models.encoder import Encoder, ImageSize, height_width
from fedkeel.options import hints_of
from fedkeel.registry import Registry, first_sentence
from fedkeel.spec import parse

MODELS: Registry[Classifier] = Registry("model")

B = TypeVar("B", bound=Callable[..., Encoder])


def network(name: str, *, paper: str) -> Callable[[B], B]:
    """Decorator: make an encoder's builder known as a model. The head, and a projector if asked for, are added here.

    The builder takes `in_channels`, `image_size` (None when unknown) if the network depends on it, and its own options.
    """
    shared_with_all = ("num_classes", "in_channels", "image_size", "projector")

    def remember(encoder: B) -> B:
        def build_model(
            num_classes: int,
            in_channels: int = 3,
            image_size: ImageSize | None = None,
            projector: int | None = None,
            **options: Any,
        ) -> Classifier:
            if "image_size" in parameters:
                options["image_size"] = image_size
            return classify(encoder(in_channels=in_channels, **options), num_classes, projector)

        # The registry reads a builder's options from its signature: show the network's own ones too.
        parameters = inspect.signature(encoder).parameters
        shared = [p for name, p in inspect.signature(build_model).parameters.items() if name in shared_with_all]
        own = [p for name, p in parameters.items() if name not in shared_with_all]
        build_model.__signature__ = inspect.Signature(shared + own)  # type: ignore[attr-defined]
        build_model.__annotations__ = {**hints_of(encoder), **build_model.__annotations__}
        MODELS.register(name, summary=first_sentence(inspect.getdoc(encoder) or ""), paper=paper)(build_model)
        return encoder

    return remember


def classify(encoder: Encoder, num_classes: int, projector: int | None = None) -> Classifier:
    """An encoder with a linear head, and UniVarFL's projector of that width between them when asked for."""
    if projector is not None:
        if not isinstance(projector, int) or isinstance(projector, bool) or projector < 1:
            raise FedkeelError(f"projector is {projector!r}: give its width, e.g. 256, or leave it out.")
        encoder.project(projector)
    if any(parameter.numel() == 0 for parameter in encoder.parameters()):
        raise FedkeelError("These options leave a layer of the model without weights: give larger ones.")
    return Classifier(encoder, nn.Linear(encoder.feature_dim, num_classes), encoder.feature_dim, num_classes)


def build(
    name: str,
    *,
    num_classes: int,
    in_channels: int = 3,
    image_size: ImageSize | None = None,
    **options: Any,
) -> Classifier:
    """A new model by name: one of `names()`, `timm:NAME`, or the bare name of a timm model.

    `image_size` is needed by networks that flatten their feature map (None: the size of the paper) and lets every
    network refuse images that are too small for it.

    >>> from fedkeel import models
    >>> models.build("simple_cnn", num_classes=10, image_size=32).feature_dim
    128
    """
    if not isinstance(num_classes, int) or num_classes < 2:
        raise FedkeelError(f"num_classes is {num_classes!r}: a classifier needs at least 2.")
    if not isinstance(in_channels, int) or in_channels < 1:
        raise FedkeelError(f"in_channels is {in_channels!r}: an image has at least 1.")
    if image_size is not None:
        image_size = height_width(image_size)
    if isinstance(name, str) and name not in MODELS:
        projector = options.pop("projector", None)
        encoder = timm_models.encoder(name, in_channels, image_size, list_of_own=names(), **options)
        return classify(encoder, num_classes, projector)
    return MODELS.make(name, num_classes=num_classes, in_channels=in_channels, image_size=image_size, **options)


def build_spec(text: str, *, num_classes: int, in_channels: int = 3, image_size: ImageSize | None = None) -> Classifier:
    """A new model from a name with options, as typed: `resnet18(stem=small, projector=512)`."""
    spec = parse(text)
    given = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
    for option in given.keys() & spec.options.keys():
        raise FedkeelError(f"'{text}' gives {option}, which follows from the data: leave it out.")
    return build(spec.name, num_classes=num_classes, in_channels=in_channels, image_size=image_size, **spec.options)


def names() -> list[str]:
    """The networks of this package; timm's come on top where it is installed."""
    return MODELS.names()
