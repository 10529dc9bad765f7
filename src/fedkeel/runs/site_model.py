"""A model for one site, as a file: tensors under the names of the run's `model.safetensors`, and what they are, inside
of it (`fedkeel.json` in the header) and in FILE.json beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch

from fedkeel.core.state import Tensors
from fedkeel.errors import FedkeelError, first_line
from fedkeel.files import explained, plain, write_atomically

CARD = "fedkeel.json"  # what a file says of itself, inside of it too


@dataclass(frozen=True)
class SiteModel:
    """What is in such a file.

    Attributes:
        tensors: of the whole network, with the layers that a client keeps.
        card: among others `calibration`, `client`, and `files`, the checksums of what it was made of.
    """

    tensors: Tensors
    card: Mapping[str, Any]

    def write(self, path: Path) -> Path:
        text = json.dumps(plain(dict(self.card)), indent=1)
        tensors = {name: value.detach().cpu().contiguous().clone() for name, value in self.tensors.items()}
        with explained(path, ""):
            write_atomically(path, safetensors.torch.save(tensors, metadata={CARD: text}))
            write_atomically(path.with_name(f"{path.name}.json"), text.encode() + b"\n")
        return path

    @staticmethod
    def read(path: Path) -> SiteModel:
        try:
            with safetensors.safe_open(path, "pt") as file:
                card = json.loads((file.metadata() or {}).get(CARD, "null"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a table)
        except (OSError, safetensors.SafetensorError, ValueError, RecursionError) as error:
            raise FedkeelError(f"'{path}' cannot be read ({first_line(error)}): {WANTED}") from error
        known = isinstance(card, dict) and isinstance(card.get("calibration"), dict)
        if not known or not isinstance(card.get("client"), str | None):
            raise FedkeelError(f"'{path}' does not say how it was calibrated: {WANTED}")
        return SiteModel(tensors, card)


WANTED = "give a file that 'fedkeel calibrate' wrote with a name that ends in .safetensors."
