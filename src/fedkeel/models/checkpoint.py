"""Weights from a file, e.g. of ImageNet, into any model: safetensors, or a `.pth` of which only tensors are read.

A tensor goes where its name is found: behind what all of the file's names begin with (`module.`, `model.`), and behind
`encoder.` or the like in the model. A classifier of another name or number of classes is left out.
"""

import pickle
from collections.abc import Mapping
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

WRAPPERS = ("state_dict", "model_state_dict", "model")  # under which a training checkpoint keeps the tensors
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
    .pth or .pt; nothing in it is executed.

    No example here, since it needs a file: `load_weights(model, "resnet18.safetensors").missing`.
    """
    entries = dict(model.state_dict(keep_vars=True))
    head = next(f"{name}." for name, module in model.named_modules() if module is model.head)
    given = read(path)
    places = _places(list(given), entries)
    if all(place.startswith(head) for place in places.values()):
        raise FedkeelError(
            f"No name in '{path}' (e.g. '{next(iter(given))}') is of this model: give weights of the same."
        )
    loaded: Tensors = {}
    for name, place in places.items():
        there, here = given[name], entries[place]
        if there.shape == here.shape:
            loaded[place] = there.to(here)
        elif not place.startswith(head):
            raise FedkeelError(
                f"The weights in '{path}' do not fit: '{place}' has shape {tuple(there.shape)} there and "
                f"{tuple(here.shape)} in the model: give weights of the same network, stem and image channels."
            )
    state.load(entries, loaded)
    missing = [name for name in entries if name not in loaded]
    return Loaded(
        path=str(path),
        tensors=len(loaded),
        new_head=any(name.startswith(head) for name in missing),
        missing=tuple(name for name in missing if not name.startswith(head)),
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
    if isinstance(content, Mapping):
        content = next((content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)), content)
    tensors = {str(k): v for k, v in content.items() if isinstance(v, Tensor)} if isinstance(content, Mapping) else {}
    if not tensors:
        raise FedkeelError(f"'{path}' holds no named tensors: give a file saved from a state_dict().")
    return tensors


def _places(names: list[str], entries: Mapping[str, Tensor]) -> dict[str, str]:
    """The model's entry for each name of the file that has one, in the way in which most have."""
    first = names[0].split(".")
    prefixes = [".".join([*first[:parts], ""]) for parts in range(len(first))]
    shared = [prefix for prefix in prefixes if all(name.startswith(prefix) for name in names)]
    ways = [{name: f"{body}{name.removeprefix(prefix)}" for name in names} for prefix in shared for body in BODIES]
    found = [{name: place for name, place in way.items() if place in entries} for way in ways]
    return max(found, key=len)
