"""Decoding image files into one array: RGB, one size, transparency over white, broken ones named and left out."""

import io
import logging
import math
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fedkeel.data.formats.cache import Bytes, stored
from fedkeel.data.formats.dicom import ENDINGS as DICOM
from fedkeel.data.formats.dicom import MissingPackage, is_dicom, read_dicom
from fedkeel.data.population import IntArray
from fedkeel.errors import DataError

log = logging.getLogger("fedkeel")

WHITE_IS_ZERO = 262  # the tag of a TIFF file
LARGE = 2**24  # pixels of an image; of larger ones, one is decoded at a time
TOLERATED = 0.01  # share of the images that may be broken, unless something else is said
AT_ONCE = 64  # images for a thread: handing over a small one takes longer than decoding it
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif", *DICOM}
one_large_at_a_time = threading.Lock()


def is_image(file: Path) -> bool:
    """By its name, or by what it begins with where the name has no ending."""
    return file.suffix.lower() in SUFFIXES or is_dicom(file)


def decode(content: Path | bytes, size: int) -> Bytes:
    """One image as (3, size, size), squeezed to a square.

    What makes that impossible is an exception of some kind whose text says it.
    """
    with open_image(content) as image:
        if image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        return np.asarray(image, np.uint8).transpose(2, 0, 1)


@contextmanager
def open_image(content: Path | bytes) -> Iterator[Image.Image]:
    """A file, or what is in one, as RGB, turned upright as its EXIF data say; of several pictures the first."""
    if is_dicom(content):
        yield rgb(read_dicom(content))
        return
    try:
        opening = Image.open(io.BytesIO(content) if isinstance(content, bytes) else content)
    except Image.DecompressionBombError:
        raise DataError(f"it has more than the {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels that are read") from None
    except UnidentifiedImageError:
        raise DataError("it is no image of a kind that is read") from None
    with opening as opened, one_large_at_a_time if opened.width * opened.height > LARGE else nullcontext():
        opened.load()
        image = rgb(ImageOps.exif_transpose(opened))
        # A scan may store white as zero, which Pillow heeds in images of eight bits only.
        negative = opened.mode.startswith("I") and getattr(opened, "tag_v2", {}).get(WHITE_IS_ZERO, 1) == 0
        yield ImageOps.invert(image) if negative else image


def rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        # Pillow clips 16-bit grey at 255, which turns most scans white: keep the upper eight bits instead.
        values = np.asarray(image).astype(np.int64)
        if values.size and (values.min() < 0 or values.max() >= 2**16):
            raise DataError("its pixels are not from 0 to 65,535, and nothing says what is black and what is white")
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
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


def resize_all(images: Bytes, size: int, into: Bytes | None = None) -> Bytes:
    """Plain pixels, (N, H, W) grey or (N, H, W, 3), as RGB (N, 3, size, size); resized as decoded images are."""
    if images.ndim == 3:
        images = np.repeat(images[..., None], 3, axis=3)
    if images.shape[1:3] == (size, size):
        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))

    result = np.empty((len(images), 3, size, size), np.uint8) if into is None else into
    for position, image in enumerate(images):
        smaller = Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR)
        result[position] = np.asarray(smaller).transpose(2, 0, 1)
    return result


@dataclass(frozen=True)
class Encoded:
    """Images as they lie in files: `contents` gives files or bytes, and is only called when they are not cached."""

    name: str  # of the data set
    about: str  # where they lie
    key: object  # by which the cache knows them
    count: int
    contents: Callable[[], Sequence[Path] | Sequence[bytes]]
    label: Callable[[int], str]  # names one for messages


def decode_all(
    source: Encoded, size: int, *, tolerate: float = TOLERATED, on_disk: bool = False
) -> tuple[Bytes, IntArray]:
    """Decode images, or take them from the cache: (images, positions of those that could be decoded).

    `tolerate` is the share that may be broken. With `on_disk` the images are mapped from the cache, and none but those
    that are being decoded is ever in memory.
    """

    def build(images: Bytes) -> tuple[IntArray, list[str]]:
        def attempt(position: int, content: Path | bytes) -> str:
            try:
                images[position] = decode(content, size)
            except (MemoryError, MissingPackage):
                raise
            except Exception as error:  # Pillow raises errors of many kinds for a broken file
                return reason(error)
            return ""

        problems = in_threads(attempt, range(source.count), source.contents())
        broken = {position: problem for position, problem in enumerate(problems) if problem}
        refuse_too_many(source, broken, tolerate)
        kept = np.array([position for position in range(source.count) if position not in broken], np.int64)
        for place, position in enumerate(kept) if broken else ():  # in place: a second copy may not fit
            images[place] = images[position]
        return kept, list(broken.values())

    shape = (source.count, 3, size, size)
    images, kept, problems = stored(source.name, [source.key, size], shape, build, about=source.about, on_disk=on_disk)
    lost = np.setdiff1d(np.arange(source.count), kept)
    broken = dict(zip(lost.tolist(), problems, strict=True))
    refuse_too_many(source, broken, tolerate)  # more of them may have been tolerated when they were decoded
    for position, problem in broken.items():
        name = source.label(position)
        log.warning("The image '%s' of '%s' cannot be decoded and is left out: %s.", name, source.name, problem)
    if broken:
        log.warning("%d of the %d images of '%s' are left out.", len(broken), source.count, source.name)
    return images, kept


def refuse_too_many(source: Encoded, broken: Mapping[int, str], tolerate: float) -> None:
    if len(broken) <= tolerate * source.count:
        return
    few = [f"'{source.label(position)}' ({problem})" for position, problem in list(broken.items())[:3]]
    enough = math.ceil(1000 * len(broken) / source.count) / 1000
    advice = f", or give tolerate={enough:g} (--tolerate {enough:g}) to do without them" if enough < 1 else ""
    raise DataError(
        f"{len(broken)} of the {source.count} images of '{source.name}' cannot be decoded, more than "
        f"{100 * tolerate:g} %: repair or remove {', '.join(few)}{' and others' if len(broken) > 3 else ''}{advice}."
    )


def in_threads(attempt: Callable[..., str], *items: Iterable[Any]) -> list[str]:
    """What `attempt` says of each: Pillow decodes outside of the interpreter lock.

    It warns of large images and odd metadata without saying of which file; that is for one thread to silence.
    """
    calls = list(zip(*items, strict=True))
    pieces = [calls[first : first + AT_ONCE] for first in range(0, len(calls), AT_ONCE)]
    with warnings.catch_warnings(), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        warnings.simplefilter("ignore")
        return [said for piece in pool.map(lambda piece: [attempt(*call) for call in piece], pieces) for said in piece]
