"""Tiny data sets in their own formats."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
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


def parquet(
    folder: Path,
    train: int,
    test: int,
    *,
    column: str = "img",
    labels_in: str = "label",
    size: int = 8,
    **columns: object,
) -> Path:
    """train.parquet and test.parquet as on Hugging Face: image n has the red n, and its class is n % 10."""
    pyarrow, written = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir(parents=True, exist_ok=True)
    for use, count in (("train", train), ("test", test)):
        rows = []
        for n in range(count):
            content = io.BytesIO()
            Image.new("RGB", (size, size), (n, 0, 255)).save(content, "PNG")
            rows.append({"bytes": content.getvalue(), "path": None})
        table = {column: rows, labels_in: [n % 10 for n in range(count)], **(columns if use == "train" else {})}
        written.write_table(pyarrow.table(table), folder / f"{use}.parquet")
    return folder
