"""Networks of timm (`pip install fedkeel[timm]`), imported only when one is asked for.

GReg's Table 4, HBN's Table 5 and FedWon's Figure 4 use MobileNetV2, EfficientNet-B0, DenseNet-121, VGG, LeViT-128s and
MobileViT-s from there.
"""

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedkeel.errors import FedkeelError, first_line, nearest
from fedkeel.models.architecture import refuse_strange
from fedkeel.models.encoder import MODELS, Encoder
from fedkeel.options import checked
from fedkeel.spec import Spec, parse

PREFIX = "timm:"
NAME = re.compile(r"\w{1,80}(\.\w{1,80})?", re.ASCII)  # a pretrained tag may follow a dot: resnet18.a1_in1k
OPTIONS = (  # that describe an architecture; none names a file or an address
    *("drop_rate", "drop_path_rate", "act_layer", "norm_layer", "global_pool"),
    *("patch_size", "embed_dim", "depth", "depths", "layers"),
)
LARGEST = 4096  # number that one of them may be
HINT = "timm.list_models() shows what there is."


class TimmEncoder(Encoder):
    """A timm network without its classifier: what its own head would see are the features."""

    def __init__(self, network: nn.Module, feature_dim: int) -> None:
        super().__init__(feature_dim)
        self.network = network

    def extract(self, x: Tensor) -> Tensor:
        features: Tensor = self.network(x)
        return features


def encoder(
    name: str, in_channels: int, image_size: tuple[int, int] | None, *, pretrained: bool = False, **options: Any
) -> TimmEncoder:
    """Build the network `timm:NAME`. `OPTIONS`, and no others, go to `timm.create_model`. `pretrained` fetches the
    weights that timm knows the network's address of."""
    checked(pretrained, bool, f"The option 'pretrained' of '{name}'")
    timm, timm_name = find(name, options)
    options |= {"pretrained": pretrained, "num_classes": 0, "in_chans": in_channels}
    try:
        try:  # networks with positions (LeViT, ViT) must know the image size; the others do not take it
            sized = {"img_size": image_size, **options} if image_size is not None else options
            network = timm.create_model(timm_name, **sized)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            network = timm.create_model(timm_name, **options)
        return TimmEncoder(network, _feature_dim(network, in_channels, image_size))
    except Exception as error:
        raise FedkeelError(
            f"'{name}' cannot be built with these options for images of this size ({first_line(error)}): change them."
        ) from error


def is_file(weights: str) -> bool:
    """Whether the option `weights` names a file, and not what timm calls its weights."""
    return Path(weights).suffix in (".safetensors", ".pth", ".pt") or (bool(weights) and Path(weights).is_file())


def with_weights(model: str, weights: str) -> str:
    """The model with the weights that timm has under this name; "pretrained" are those it takes by itself.

    >>> with_weights("timm:resnet18", "a1_in1k"), with_weights("simple_cnn", "")
    ('timm:resnet18.a1_in1k(pretrained=True)', 'simple_cnn')
    """
    if not weights or is_file(weights):
        return model
    parsed = parse(model)
    if not parsed.name.startswith(PREFIX) or "." in parsed.name:
        raise FedkeelError(
            f"'weights' is '{weights}', which is no .safetensors, .pth or .pt file: weights with a name are those of "
            f"timm, for --model {PREFIX}NAME."
        )
    name = parsed.name if weights == "pretrained" else f"{parsed.name}.{weights}"
    return str(Spec(name, {**parsed.options, "pretrained": True}))


def find(name: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """timm, and the network's name there; refused if there is no such network, or its options are not of that kind."""
    timm_name = name.removeprefix(PREFIX)
    if timm_name == name or not NAME.fullmatch(timm_name):  # timm would read a folder, or fetch from an address
        ending = nearest(name, MODELS.names())
        raise FedkeelError(f"There is no model named '{name[:200]}' (timm's are written '{PREFIX}NAME'): {ending}")
    for option in options:
        if option not in OPTIONS:
            ending = nearest(option, OPTIONS)
            raise FedkeelError(f"The option '{option}' of '{name}' is none that may be given here: {ending}")
    refuse_strange(name, options, LARGEST)
    try:
        timm = importlib.import_module("timm")
    except Exception as error:
        raise FedkeelError(
            f"'{name}' needs timm, which cannot be imported ({first_line(error)}): pip install 'fedkeel[timm]'."
        ) from error
    if not timm.is_model(timm_name.partition(".")[0]):
        raise FedkeelError(f"timm has no model named '{timm_name}': {nearest(timm_name, timm.list_models(), HINT)}")
    return timm, timm_name


@torch.no_grad()
def _feature_dim(network: nn.Module, in_channels: int, image_size: tuple[int, int] | None) -> int:
    """Pass an image through: what timm declares as `num_features` is not what every network returns."""
    size = image_size or getattr(network, "default_cfg", {}).get("input_size", (3, 224, 224))[1:]
    training = network.training
    features = network.eval()(torch.zeros(1, in_channels, *size))
    network.train(training)
    if not isinstance(features, Tensor) or features.ndim != 2:
        raise ValueError("it gives no feature vector per image")
    return features.shape[1]
