"""Decoding image files into one array: RGB, one size, transparency over white, broken ones named and left out."""

import io
import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from fedkeel.data.formats.npz import Arrays, cached
from fedkeel.data.population import IntArray
from fedkeel.errors import DataError

log = logging.getLogger("fedkeel")

Bytes = npt.NDArray[np.uint8]
CORRUPT_SHARE = 0.01
LARGE = 2**24  # pixels of an image; of larger ones, one is decoded at a time
one_large_at_a_time = threading.Lock()


def decode(content: Path | bytes, size: int) -> Bytes:
    """One image as (3, size, size), RGB, turned upright as its EXIF data say, and squeezed to a square.

    What makes that impossible is an exception of some kind whose text says it.
    """
    try:
        opening = Image.open(io.BytesIO(content) if isinstance(content, bytes) else content)
    except Image.DecompressionBombError:
        raise DataError(f"it has more than the {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels that are read") from None
    except UnidentifiedImageError:
        raise DataError("it is no image of a kind that is read") from None
    with opening as opened, one_large_at_a_time if opened.width * opened.height > LARGE else nullcontext():
        opened.load()
        image = rgb(ImageOps.exif_transpose(opened))
        if image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image, np.uint8).transpose(2, 0, 1)


def rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # Pillow clips 16-bit grey at 255, which turns most scans white: keep the upper eight bits instead.
        return Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise DataError("its pixels are floating-point numbers, of which nothing says what is black and what is white")
    if image.has_transparency_data:
        # What lies under transparent pixels was never meant to be seen, and differs from program to program.
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        white.alpha_composite(image)
        image = white
    return image.convert("RGB")


def reason(error: Exception) -> str:
    """Why an image cannot be decoded, on one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def resize_all(images: Bytes, size: int) -> Bytes:
    """Plain pixels, (N, H, W) grey or (N, H, W, 3), as RGB (N, 3, size, size); resized as decoded images are."""
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

    def build() -> Arrays:
        images = np.empty((count, 3, size, size), np.uint8)

        def attempt(position: int, content: Path | bytes) -> str:
            try:
                images[position] = decode(content, size)
            except MemoryError:
                raise
            except Exception as error:  # Pillow raises errors of many kinds for a broken file
                return reason(error)
            return ""

        problems = in_threads(attempt, range(count), contents())
        broken = {position: problem for position, problem in enumerate(problems) if problem}
        if len(broken) > CORRUPT_SHARE * count:
            few = [f"'{label(position)}' ({problem})" for position, problem in list(broken.items())[:3]]
            raise DataError(
                f"{len(broken)} of the {count} images of '{name}' cannot be decoded, more than 1 %: "
                f"repair or remove {', '.join(few)}{' and others' if len(broken) > 3 else ''}."
            )
        kept = np.array([position for position in range(count) if position not in broken], np.int64)
        for place, position in enumerate(kept) if broken else ():  # in place: a second copy may not fit
            images[place] = images[position]
        return {"images": images[: len(kept)], "kept": kept, "problems": np.array(list(broken.values()), np.str_)}

    arrays = cached(name, [key, size], build)
    lost = np.setdiff1d(np.arange(count), arrays["kept"])
    for position, problem in zip(lost.tolist(), arrays["problems"], strict=True):
        log.warning("The image '%s' of '%s' cannot be decoded and is left out: %s.", label(position), name, problem)
    if len(lost):
        log.warning("%d of the %d images of '%s' are left out.", len(lost), count, name)
    return arrays["images"], arrays["kept"]


def in_threads(attempt: Callable[..., str], *items: Iterable[Any]) -> list[str]:
    """What `attempt` says of each: Pillow decodes outside of the interpreter lock.

    It warns of large images and odd metadata without saying of which file; that is for one thread to silence.
    """
    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")
        return list(pool.map(attempt, *items))
