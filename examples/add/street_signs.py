"""Street signs (Example et al., 2024): three signs, photographed by two towns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedkeel.data import TreeReader, published
from fedkeel.options import Count


@published
@dataclass(frozen=True)
class StreetSigns(TreeReader):
    """Street signs: 90 photographs of 3 signs in two towns."""

    name = "street-signs"
    paper = "Example et al., 2024"
    home = "https://example.org/street-signs"
    licence = "CC BY 4.0"
    layout = "street-signs/<town>/<sign>/*.png   with the towns north, south"
    folders = ("street-signs", "street_signs")
    class_names = ("stop", "way", "yield")
    sizes: ClassVar = {"north": 60, "south": 30}
    transforms = ("flip+normalise", "normalise")

    size: Count = 64
