"""What the networks of this package have in common: images in, features out, and a name that they are known by."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from fedkeel.core.types import Classifier
from fedkeel.errors import FedkeelError
from fedkeel.options import Count, checked, hints_of
from fedkeel.registry import Registry, first_sentence

MODELS: Registry[Classifier] = Registry("model")
"""The networks by name; those of timm are not among them."""

ImageSize = int | tuple[int, int]
"""Height and width of the images in pixels; one number for square ones."""


class Projector(nn.Sequential):
    """UniVarFL's projector: two layers, each linear, batch norm and ReLU ("Models" of its Section 4).

    The regularisers of UniVarFL act on its output; the paper takes `width` 256 for the small CNN and 512 for ResNet-18.
    """

    def __init__(self, feature_dim: int, width: int) -> None:
        super().__init__()
        for inputs in (feature_dim, width):
            self.extend([nn.Linear(inputs, width), nn.BatchNorm1d(width), nn.ReLU()])


class Encoder(nn.Module):
    """Images (N, C, H, W) -> features (N, `feature_dim`). A network writes `extract`.

    >>> class Flat(Encoder):
    ...     def __init__(self, in_channels=3):
    ...         super().__init__(feature_dim=in_channels)
    ...
    ...     def extract(self, x):
    ...         return x.mean((2, 3))
    >>> Flat()(torch.zeros(2, 3, 8, 8)).shape
    torch.Size([2, 3])
    """

    # A member of the encoder and not a module around it: the names of the network's own parameters stay the same
    # with and without a projector, so a checkpoint fits both.
    projector: nn.Module | None
    only_images = True

    def __init__(self, feature_dim: int) -> None:
        super().__init__()
        self.feature_dim = feature_dim
        self.projector = None
        self.image_size: tuple[int, int] | None = None  # the only one that it takes, if it flattens its feature map

    def extract(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        if self.only_images and x.ndim != 4:
            raise FedkeelError(
                f"This network takes images, and a sample has the shape {tuple(x.shape[1:])}: choose the model 'mlp'."
            )
        if self.image_size is not None and x.shape[-2:] != self.image_size:
            raise FedkeelError(f"This network is built for image_size={self.image_size} and got {tuple(x.shape[-2:])}.")
        features = self.extract(x)
        return features if self.projector is None else self.projector(features)

    def flattens(self, image_size: ImageSize, shrinks: int) -> int:
        """The places of the feature map that the first fully connected layer is made for, where so many pixels of a
        side become one; images of other sizes are refused."""
        self.image_size = height_width(image_size)
        height, width = (side // shrinks for side in self.image_size)
        if min(height, width) < 1:
            raise FedkeelError(f"Images of {self.image_size} px are too small for this network: enlarge them.")
        return height * width


def height_width(image_size: ImageSize) -> tuple[int, int]:
    """`(height, width)`, checked."""
    pair = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
    if len(pair) != 2 or any(not isinstance(side, int) or side < 1 for side in pair):
        raise FedkeelError(f"image_size is {image_size!r}: give pixels as one number or as (height, width).")
    return pair[0], pair[1]


B = TypeVar("B", bound=Callable[..., Encoder])


def network(name: str, *, paper: str) -> Callable[[B], B]:
    """Decorator: make an encoder's builder known as a model. The head, and a projector if asked for, are added here.

    The builder takes `in_channels`, `image_size` (None when unknown) if the network depends on it, and its own options.

    >>> @network("colours-example", paper="none")
    ... class Colours(Encoder):
    ...     def __init__(self, in_channels=3):
    ...         super().__init__(feature_dim=in_channels)
    >>> MODELS.make("colours-example", num_classes=5).head
    Linear(in_features=3, out_features=5, bias=True)
    """

    def remember(encoder: B) -> B:
        def build_model(
            num_classes: int,
            in_channels: int = 3,
            image_size: ImageSize | None = None,
            projector: Count | None = None,
            **options: Any,
        ) -> Classifier:
            if "image_size" in own:
                options["image_size"] = image_size
            return classify(encoder(in_channels=in_channels, **options), num_classes, projector)

        # The registry reads a builder's options from its signature: show the network's own ones too.
        own = inspect.signature(encoder).parameters
        *shared, _ = inspect.signature(build_model).parameters.values()
        both = {parameter.name: parameter for parameter in (*shared, *own.values())}
        build_model.__signature__ = inspect.Signature([*both.values()])  # type: ignore[attr-defined]
        build_model.__module__ = encoder.__module__  # whose file it is
        build_model.__annotations__ = {**hints_of(encoder), **build_model.__annotations__}
        MODELS.register(name, summary=first_sentence(inspect.getdoc(encoder) or ""), paper=paper)(build_model)
        return encoder

    return remember


def classify(encoder: Encoder, num_classes: int, projector: int | None = None) -> Classifier:
    """An encoder with a linear head, and UniVarFL's projector of that width between them when asked for."""
    if projector is not None:
        checked(projector, Count, "The option 'projector'")
        encoder.projector, encoder.feature_dim = Projector(encoder.feature_dim, projector), projector
    if any(parameter.numel() == 0 for parameter in encoder.parameters()):
        raise FedkeelError("These options leave a layer of the model without weights: give larger ones.")
    return Classifier(encoder, nn.Linear(encoder.feature_dim, num_classes), encoder.feature_dim, num_classes)
