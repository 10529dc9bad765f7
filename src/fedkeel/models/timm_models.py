"""Networks of timm (`pip install fedkeel[timm]`), imported only when one is asked for.

GReg's Table 4 uses MobileNetV2, EfficientNet-B0, DenseNet-121, LeViT-128s and MobileViT-s from there.
"""

import importlib
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor, nn

from fedkeel.errors import FedkeelError, first_line, nearest, unknown
from fedkeel.models import architecture
from fedkeel.models.encoder import MODELS, Encoder

PREFIX = "timm:"
NAME = re.compile(r"\w{1,80}(\.\w{1,80})?", re.ASCII)  # a pretrained tag may follow a dot: resnet18.a1_in1k
OLDEST = (1, 0, 26)  # earlier ones unpickle whatever file or address they are given


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
    """Build the timm network `name` (with or without `timm:`). Options that describe an architecture, and no others,
    go to `timm.create_model`. `pretrained` fetches the weights that timm knows the network's address of."""
    if not isinstance(pretrained, bool):
        raise FedkeelError(f"The option 'pretrained' of '{name}' is {str(pretrained)[:80]!r}: give true or false.")
    timm, timm_name = find(name, options)
    arguments = {"pretrained": pretrained, "num_classes": 0, "in_chans": in_channels, **options}
    network = _create(timm, timm_name, image_size, arguments)
    return TimmEncoder(network, _feature_dim(timm_name, network, in_channels, image_size))


def find(name: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """timm, and the network's name there; refused if there is no such network, or its options are not of that kind."""
    asked_for_timm, timm_name = name.startswith(PREFIX), name.removeprefix(PREFIX)
    own = MODELS.names()
    nearly_own = not asked_for_timm and bool(get_close_matches(name, own, n=1, cutoff=0.5))
    if not NAME.fullmatch(timm_name):
        if nearly_own:
            raise FedkeelError(unknown("model", name, own))
        # timm would take it for a folder to read or an address to fetch from.
        raise FedkeelError(f"'{name[:200]}' is not the name of a network: give one of timm's own, such as 'resnet18'.")
    architecture.refuse_strange(name, options, architecture.TIMM)
    try:
        timm = _import_timm(name)
    except FedkeelError as error:
        # Whether timm has such a model cannot be said; which of ours are nearly called so can.
        if not asked_for_timm:
            raise FedkeelError(f"{str(error).rstrip('.')}, or {nearest(name, own)}") from error
        raise
    if timm.is_model(timm_name.partition(".")[0]):
        return timm, timm_name
    if asked_for_timm:
        close = get_close_matches(timm_name, timm.list_models(), n=1, cutoff=0.5)
        ending = f"did you mean '{PREFIX}{close[0]}'?" if close else "timm.list_models() shows what there is."
        raise FedkeelError(f"timm has no model named '{timm_name}': {ending}")
    # A near miss of a name of ours is more likely meant than one of timm's thousand.
    raise FedkeelError(unknown("model", name, own if nearly_own else timm.list_models()))


def _import_timm(name: str) -> Any:
    if name.startswith(PREFIX):
        which = f"The model '{name}' comes from timm, which"
    else:
        which = f"There is no model named '{name}' here, and timm, which may have it,"
    try:
        timm = importlib.import_module("timm")
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "timm":
            raise FedkeelError(f"{which} is not installed: pip install 'fedkeel[timm]'.") from error
        raise FedkeelError(
            f"{which} is installed but cannot be imported ({first_line(error)}): "
            f"install a torchvision that matches torch {torch.__version__}."
        ) from error
    version = str(getattr(timm, "__version__", "0"))
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise FedkeelError(
            f"The model '{name}' comes from timm, and timm {version} can be made to run foreign code: "
            f"install timm {wanted} or later, pip install 'timm>={wanted}'."
        )
    return timm


def _create(timm: Any, name: str, image_size: tuple[int, int] | None, arguments: dict[str, Any]) -> nn.Module:
    """Networks with positions (LeViT, ViT) must know the image size; the others do not take it."""
    try:
        if image_size is not None and "img_size" not in arguments:
            try:
                return timm.create_model(name, img_size=image_size, **arguments)  # type: ignore[no-any-return]
            except TypeError as error:
                if "img_size" not in str(error):
                    raise
        return timm.create_model(name, **arguments)  # type: ignore[no-any-return]
    except Exception as error:
        message = f"timm could not build '{name}' with these options ({first_line(error)}): check them."
        raise FedkeelError(message) from error


def _feature_dim(name: str, network: nn.Module, in_channels: int, image_size: tuple[int, int] | None) -> int:
    """Pass an image through: what timm declares as `num_features` is not what every network returns."""
    configured = getattr(network, "default_cfg", {}).get("input_size", (in_channels, 224, 224))
    height, width = image_size or configured[1:]
    was_training = network.training
    network.eval()
    try:
        with torch.no_grad():
            features = network(torch.zeros(1, in_channels, height, width))
    except Exception as error:
        raise FedkeelError(
            f"timm's '{name}' does not work on images of {height} x {width} px ({first_line(error)}): "
            "choose another size."
        ) from error
    finally:
        network.train(was_training)
    if not isinstance(features, Tensor) or features.ndim != 2:
        raise FedkeelError(f"timm's '{name}' gives no feature vector per image: choose a classification model.")
    return features.shape[1]
