"""Decoding image files into one array: RGB, one size, broken ones named and left out."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedkeel.data.cache import Arrays, cached
from fedkeel.data.source import IntArray
from fedkeel.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger("fedkeel")

Bytes = npt.NDArray[np.uint8]
CORRUPT_SHARE = 0.01


def decode(content: Path | bytes, size: int) -> Bytes:
    """One image as (3, size, size), RGB, turned upright as its EXIF data say, and squeezed to a square."""
    from PIL import Image, ImageOps

    with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as opened:
        opened.load()
        image = rgb(ImageOps.exif_transpose(opened))
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image, np.uint8).transpose(2, 0, 1)


def rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith("I"):
        # Pillow clips 16-bit grey at 255, which turns most scans white: keep the upper eight bits instead.
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    return image.convert("RGB")


def resize_all(images: Bytes, size: int) -> Bytes:
    """Plain pixels, (N, H, W) grey or (N, H, W, 3), as RGB (N, 3, size, size); resized as decoded images are."""
    from PIL import Image

    if images.ndim == 3:
        images = np.repeat(images[..., None], 3, axis=3)
    if images.shape[1:3] == (size, size):
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))

    result = np.empty((len(images), 3, size, size), np.uint8)
    for position, image in enumerate(images):
        smaller = Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR)
        result[position] = np.asarray(smaller).transpose(2, 0, 1)
    return result


def decode_all(
    name: str,
    key: object,
    count: int,
    contents: Callable[[], Sequence[Path] | Sequence[bytes]],
    label: Callable[[int], str],
    size: int,
) -> tuple[Bytes, IntArray]:
    """Decode `count` images, or take them from the cache: (images, positions of those that could be decoded).

    `contents` gives the images' files or bytes, and is only called when they are not cached; `label` names one for
    messages.
    """

    def attempt(position: int, content: Path | bytes) -> Bytes | None:
        try:
            return decode(content, size)
        except MemoryError:
            raise
        except Exception as error:  # Pillow raises errors of many kinds for a broken file
            log.debug("%s: %s", label(position), error)
            return None

    def build() -> Arrays:
        images = np.empty((count, 3, size, size), np.uint8)
        good = np.zeros(count, bool)
        # Pillow decodes outside of the interpreter lock.
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for position, image in enumerate(pool.map(attempt, range(count), contents())):
                if image is not None:
                    images[position], good[position] = image, True
        refuse_many(name, [label(int(i)) for i in np.flatnonzero(~good)], count)
        return {"images": images if good.all() else images[good], "kept": np.flatnonzero(good)}

    arrays = cached(name, [key, size], build)
    kept = arrays["kept"]
    lost = sorted(set(range(count)) - set(kept.tolist()))
    for position in lost:
        log.warning("The image '%s' of '%s' cannot be decoded and is left out.", label(position), name)
    if lost:
        log.warning("%d of the %d images of '%s' are left out.", len(lost), count, name)
    return arrays["images"], kept


def refuse_many(name: str, broken: Sequence[str], count: int) -> None:
    if len(broken) > CORRUPT_SHARE * count:
        shown = ", ".join(f"'{file}'" for file in broken[:3]) + (" and others" if len(broken) > 3 else "")
        raise DataError(
            f"{len(broken)} of the {count} images of '{name}' cannot be decoded, more than 1 %: "
            f"repair or remove {shown}."
        )
