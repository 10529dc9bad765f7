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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from fedkeel.data.formats.cache import Bytes, stored
from fedkeel.data.formats.dicom import ENDINGS as DICOM
from fedkeel.data.formats.dicom import MissingPackage, is_dicom, read_dicom
from fedkeel.data.population import IntArray
from fedkeel.errors import DataError, quoted
from fedkeel.options import Range

log = logging.getLogger("fedkeel")

WHITE_IS_ZERO = 262  # the tag of a TIFF file
Bits = Annotated[int, Range(8, 16)]
LARGE = 2**24  # pixels of an image; of larger ones, one is decoded at a time
TOLERATED = 0.01  # share of the images that may be broken, unless something else is said
DARK = 2**14  # a quarter of what 16 bits hold: scanners of 10, 12 and 14 bits stay below
AT_ONCE = 64  # images for a thread: handing over a small one takes longer than decoding it
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif", *DICOM}
ADVICE = "if all are scans of so many bits, give bits={0}, as in folder(bits={0}), or --bits {0} to 'fedkeel join'"
one_large_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Depth:
    """How many of their 16 bits grey images use, all if it is not said, and the largest value of each, by its name."""

    bits: int | None = None
    largest: dict[str, int] = field(default_factory=dict)

    def upper(self, values: npt.NDArray[Any], name: str) -> Bytes:
        """The upper eight of the bits."""
        if values.size and (values.min() < 0 or values.max() >= 2**16):
            raise DataError("its pixels are not from 0 to 65,535, and nothing says what is black and what is white")
        self.largest[name] = largest = int(values.max(initial=0))
        bits = self.bits or 16
        if largest >= 2**bits:
            raise DataError(f"its pixels go up to {largest:,}, and bits={bits} is for values below {2**bits:,}")
        return (values >> (bits - 8)).astype(np.uint8)

    def sentences(self, advice: str) -> list[str]:
        """One about the images that come out dark, unless `bits` is given; `advice` may have a place for the number."""
        dark = sorted(name for name, largest in self.largest.items() if 0 < largest < DARK)
        if self.bits or not dark:
            return []
        bits = max(8, *(self.largest[name].bit_length() + 1 & ~1 for name in dark))
        return [
            f"{len(dark):,} of the {len(self.largest):,} grey images of 16 bits use at most {bits} of them, so that "
            f"they come out dark ({quoted(dark, 3)}): {advice.format(bits)}."
        ]


def is_image(file: Path) -> bool:
    """By its name, or by what it begins with where the name has no ending."""
    return file.suffix.lower() in SUFFIXES or is_dicom(file)


def decode(content: Path | bytes, size: int, depth: Depth | None = None, name: str = "") -> Bytes:
    """One image as (3, size, size), squeezed to a square.

    What makes that impossible is an exception of some kind whose text says it.
    """
    with open_image(content, depth, name) as image:
        if image.size != (size, size):
            image = image.resize((size, size), Image.Resampling.BILINEAR)
        return np.asarray(image, np.uint8).transpose(2, 0, 1)


@contextmanager
def open_image(content: Path | bytes, depth: Depth | None = None, name: str = "") -> Iterator[Image.Image]:
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
        image = rgb(ImageOps.exif_transpose(opened), depth, name)
        # A scan may store white as zero, which Pillow heeds in images of eight bits only.
        negative = opened.mode.startswith("I") and getattr(opened, "tag_v2", {}).get(WHITE_IS_ZERO, 1) == 0
        yield ImageOps.invert(image) if negative else image


def rgb(image: Image.Image, depth: Depth | None = None, name: str = "") -> Image.Image:
    if image.mode.startswith("I"):
        # Pillow clips 16-bit grey at 255, which turns most scans white: keep the upper eight bits instead.
        upper = (depth or Depth()).upper(np.asarray(image).astype(np.int64), name)
        return Image.fromarray(upper).convert("RGB")
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
    source: Encoded, size: int, *, tolerate: float = TOLERATED, on_disk: bool = False, bits: int | None = None
) -> tuple[Bytes, IntArray]:
    """Decode images, or take them from the cache: (images, positions of those that could be decoded).

    `tolerate` is the share that may be broken. With `on_disk` the images are mapped from the cache, and none but those
    that are being decoded is ever in memory. `bits` is how many of 16 grey images use.
    """
    depth = Depth(bits)

    def build(images: Bytes) -> tuple[IntArray, list[str]]:
        def attempt(position: int, content: Path | bytes) -> str:
            try:
                images[position] = decode(content, size, depth, source.label(position))
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
        return kept, [*broken.values(), *depth.sentences(ADVICE)]

    shape = (source.count, 3, size, size)
    key = [source.key, size, bits]
    images, kept, problems = stored(source.name, key, shape, build, about=source.about, on_disk=on_disk)
    lost = np.setdiff1d(np.arange(source.count), kept)
    broken = dict(zip(lost.tolist(), problems, strict=False))
    for sentence in problems[len(lost) :]:
        log.warning("Of '%s', %s", source.name, sentence)
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
