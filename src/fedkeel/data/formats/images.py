"""Image files as RGB: upright, transparency over white, the upper eight bits of what has more."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from fedkeel.data.formats.dicom import ENDINGS as DICOM
from fedkeel.data.formats.dicom import is_dicom, read_dicom
from fedkeel.data.store import Bytes
from fedkeel.errors import DataError, quoted
from fedkeel.options import Range

WHITE_IS_ZERO = 262  # the tag of a TIFF file
Bits = Annotated[int, Range(8, 16)]
DARK = 2**14  # a quarter of what 16 bits hold: scanners of 10, 12 and 14 bits stay below
SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif", *DICOM}
ADVICE = "if all are scans of so many bits, give bits={0}, as in folder(bits={0}), or --bits {0} to 'fedkeel join'"


@dataclass(frozen=True)
class Depth:
    """How many of their 16 bits grey images use, all if it is not said, and the largest value of each, by its name."""

    bits: int | None = None
    largest: dict[str, int] = field(default_factory=dict)

    def upper(self, values: npt.NDArray[Any], name: str) -> Bytes:
        """The upper eight of the bits."""
        bits, largest = self.bits or 16, int(values.max(initial=0))
        if values.min(initial=0) < 0 or largest >= 2**bits:
            span = f"from {values.min():,} to {largest:,}"
            raise DataError(f"its pixels go {span}: {bits} bits hold 0 to {2**bits - 1:,}")
        self.largest[name] = largest
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


def decode(content: Path | bytes | Bytes, size: int, depth: Depth | None = None, name: str = "") -> Bytes:
    """One image, squeezed to a square, as (size, size, 3): a file, what is in one, or pixels, (H, W) or (H, W, 3).

    What makes that impossible is an exception of some kind whose text says it.
    """
    if isinstance(content, np.ndarray):
        return squeezed(Image.fromarray(content).convert("RGB"), size)
    with open_image(content, depth, name) as image:
        return squeezed(image, size)


def squeezed(image: Image.Image, size: int) -> Bytes:
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image, np.uint8)


@contextmanager
def open_image(content: Path | bytes, depth: Depth | None = None, name: str = "") -> Iterator[Image.Image]:
    """A file, or what is in one, as RGB, turned upright as its EXIF data say; of several pictures the first."""
    if is_dicom(content):
        yield rgb(read_dicom(content))
        return
    try:
        opening = Image.open(io.BytesIO(content) if isinstance(content, bytes) else content)
    except UnidentifiedImageError:
        raise DataError("it is no image of a kind that is read") from None
    with opening as opened:
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
