"""Weights from a file, e.g. of ImageNet, into any model: safetensors, or a `.pth` of which only tensors are read.

Names are matched to the model's own wherever they begin: behind the wrappers' prefixes on one side (`module.`,
`state_dict`), behind `encoder.` on the other. Files of torchvision's AlexNet and of the package efficientnet_pytorch
name their layers otherwise and are renamed first. A classifier of another number of classes is left out.
"""

import pickle
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fedkeel.core import state
from fedkeel.core.state import Tensors
from fedkeel.core.types import Classifier
from fedkeel.errors import FedkeelError, first_line, quoted

WRAPPERS = ("state_dict", "model_state_dict", "model_state", "model", "net", "network", "weights")
PREFIXES = ("module.", "model.", "state_dict.", "_orig_mod.", "net.", "backbone.")
BODIES = ("", "encoder.", "encoder.network.", "network.")
"""Where a model here keeps a network that is elsewhere by itself."""


@dataclass(frozen=True)
class Loaded:
    """What became of a file's tensors; names as the model has them (`missing`) and as the file has (`unexpected`)."""

    path: str
    tensors: int
    new_head: bool
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def __str__(self) -> str:
        left = ["the classifier stays new"] if self.new_head else []
        if self.missing:
            left.append(f"the file has none for {quoted(self.missing, 3)}")
        if self.unexpected:
            left.append(f"the model has no place for {quoted(self.unexpected, 3)}")
        return f"{self.tensors} tensors come from '{self.path}'" + (f"; {'; '.join(left)}." if left else ".")


def load_weights(model: Classifier, path: str | Path) -> Loaded:
    """Copy the file's tensors into the model where names and shapes fit, and say what did not. `path` is .safetensors,
    .pth or .pt, also as other libraries name the layers; nothing in it is executed.

    No example here, since it needs a file: `load_weights(model, "resnet18.safetensors").missing`.
    """
    entries = dict(model.state_dict(keep_vars=True))
    head = next(f"{name}." for name, module in model.named_modules() if module is model.head)
    given, body = _best_fit(read(path), entries)
    places = {name: f"{body}{name}" for name in given if f"{body}{name}" in entries}
    if not any(place.startswith(head) for place in places.values()):
        places |= _last_layer(given, places, entries, head)
    matched = {place: given[name] for name, place in places.items()}
    differing = [place for place, tensor in matched.items() if tensor.shape != entries[place].shape]
    in_body = [place for place in differing if not place.startswith(head)]
    if all(place.startswith(head) for place in matched):
        raise FedkeelError(
            f"No tensor in '{path}' belongs to this model (the file has '{next(iter(given))}', the model "
            f"'{next(iter(entries))}'): give weights of the same network."
        )
    if in_body:
        there, here = (tuple(tensors[in_body[0]].shape) for tensors in (matched, entries))
        raise FedkeelError(
            f"The weights in '{path}' do not fit: '{in_body[0]}' has shape {there} there and {here} in the model "
            f"({len(in_body)} tensors differ): give weights of the same network, with the same stem and image channels."
        )
    loaded = {place: tensor for place, tensor in matched.items() if place not in differing}
    state.load(entries, {place: tensor.to(entries[place]) for place, tensor in loaded.items()})
    return Loaded(
        path=str(path),
        tensors=len(loaded),
        new_head=any(name.startswith(head) and name not in loaded for name in entries),
        missing=tuple(name for name in entries if name not in loaded and not name.startswith(head)),
        unexpected=tuple(name for name in given if name not in places),
    )


def read(path: str | Path) -> Tensors:
    """The named tensors of a file; nothing else in it is looked at, and no code in it can run."""
    path = Path(path)
    if not path.is_file():
        raise FedkeelError(f"'weights' is '{path}', which is not a file: give a .safetensors, .pth or .pt file.")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        # Torch would advise to let the code in the file run.
        reason = "it holds more than tensors" if "weights_only" in str(error) else first_line(error)
        raise FedkeelError(
            f"The weights in '{path}' cannot be read ({reason}): give a file of tensors, saved from a state_dict()."
        ) from error
    inner = content
    while isinstance(inner, Mapping):
        content = inner
        inner = next((content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)), None)
    tensors = {str(k): v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, Mapping) else {}
    if not tensors:
        raise FedkeelError(f"'{path}' holds no named tensors: give a file saved from a state_dict().")
    return tensors


def _best_fit(given: Tensors, entries: Mapping[str, Tensor]) -> tuple[Tensors, str]:
    """The file's tensors under the names, and the place in the model, that match most."""
    candidates = [(names, body) for names in _namings(given, entries) for body in BODIES]
    fits = [sum(f"{body}{name}" in entries for name in names) for names, body in candidates]
    return candidates[fits.index(max(fits))]


def _namings(given: Tensors, entries: Mapping[str, Tensor]) -> Iterator[Tensors]:
    """The file's tensors as they are, and with what other programs put around or in place of the names taken off."""
    for _ in range(4):
        yield given
        if "_conv_stem.weight" in given:
            yield _from_efficientnet_pytorch(given, entries)
        if "features.10.weight" in given and "classifier.4.weight" in given:
            yield {_renamed(name, _ALEXNET): tensor for name, tensor in given.items()}
        prefix = next((p for p in PREFIXES if sum(name.startswith(p) for name in given) > len(given) / 2), None)
        if prefix is None:
            return
        given = {name.removeprefix(prefix): tensor for name, tensor in given.items()}


def _renamed(name: str, table: Mapping[str, str]) -> str:
    layer, _, entry = name.rpartition(".")
    return f"{table[layer]}.{entry}" if layer in table else name


_ALEXNET = {
    **{f"features.{i}": f"conv{k}" for k, i in enumerate((0, 3, 6, 8, 10), start=1)},
    "classifier.1": "fc1",
    "classifier.4": "fc2",
}
_EFFICIENTNET = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
_EXPANDING = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
    "_se_reduce": "se.conv_reduce",
    "_se_expand": "se.conv_expand",
}
_SEPARABLE = _EXPANDING | {"_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}


def _from_efficientnet_pytorch(given: Tensors, entries: Mapping[str, Tensor]) -> Tensors:
    """Blocks in one row (`_blocks.5`) become timm's, counted in each stage (`blocks.2.1`), in the model's order."""
    places = dict.fromkeys(match[0] for name in entries if (match := re.search(r"blocks\.\d+\.\d+", name)))
    stages = dict(enumerate(places))
    result: Tensors = {}
    for name, tensor in given.items():
        match = re.fullmatch(r"_blocks\.(\d+)\.(.+)", name)
        if match is None:
            result[_renamed(name, _EFFICIENTNET)] = tensor
        elif int(match[1]) in stages:
            expands = f"_blocks.{match[1]}._expand_conv.weight" in given
            own = _renamed(match[2], _EXPANDING if expands else _SEPARABLE)
            result[f"{stages[int(match[1])]}.{own}"] = tensor
        else:
            result[name] = tensor
    return result


def _last_layer(given: Tensors, places: Mapping[str, str], entries: Mapping[str, Tensor], head: str) -> dict[str, str]:
    """The place of the file's classifier, which has another name than the head here: the one matrix without a place."""
    matrices = [name for name, tensor in given.items() if tensor.ndim == 2 and name not in places]
    if len(matrices) != 1:
        return {}
    layer = matrices[0].rpartition(".")[0]
    names = {f"{layer}.{entry}": f"{head}{entry}" for entry in ("weight", "bias")}
    return {name: place for name, place in names.items() if name in given and place in entries}
