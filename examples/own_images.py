"""Your own images, from a tree root/<domain>/<class>/*.png. Without an argument, a small tree is made up first.

python examples/own_images.py [root]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import fedkeel


def make_up(root: Path) -> None:
    """Two sites photograph circles and squares, one of them in the dark."""
    generator = np.random.default_rng(0)
    rows, columns = np.mgrid[:32, :32]
    for site, light in (("lit", 200), ("dark", 60)):
        for shape in ("circle", "square"):
            folder = root / site / shape
            folder.mkdir(parents=True)
            for number in range(40):
                x, y, size = *generator.integers(10, 22, 2), generator.integers(4, 9)
                dx, dy = abs(columns - x), abs(rows - y)
                inside = dx**2 + dy**2 < size**2 if shape == "circle" else np.maximum(dx, dy) < size
                image = generator.integers(0, 40, (32, 32, 3)) + (light * inside)[..., None]
                Image.fromarray(image.clip(0, 255).astype(np.uint8)).save(folder / f"{number}.png")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        if len(sys.argv) == 1:
            make_up(root)
        federation = fedkeel.data.load("folder", root=str(root), size=32)
        for site in fedkeel.data.describe(federation):
            print(site)
        run = fedkeel.simulate(federation=federation, method="fedbn", rounds=5, learning_rate=0.05, momentum=0.9)
        print(run)
