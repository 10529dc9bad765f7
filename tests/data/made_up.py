"""Tiny data sets in their own formats."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def image(file: Path, colour: tuple[int, int, int] | int = (1, 2, 3), size: tuple[int, int] = (6, 4)) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB" if isinstance(colour, tuple) else "L", size, colour).save(file)
    return file


def tree(
    root: Path, domains: Sequence[str], classes: Sequence[str], images: int | Sequence[int] = 5, suffix: str = "png"
) -> Path:
    """root/<domain>/<class>/: red is 20 times the domain's number, green ten times the class's, blue the image's."""
    for d, domain in enumerate(domains):
        for c, label in enumerate(classes):
            for n in range(images if isinstance(images, int) else images[d]):
                image(root / domain / label / f"{n:03d}.{suffix}", (20 * d, 10 * c, n))
    return root


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)
