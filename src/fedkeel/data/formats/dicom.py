"""DICOM, in which hospitals have their images: one picture of eight bits, as a viewer shows it at first.

Grey values are rescaled (slope and intercept), then cut to the file's window. Without one, black and white are the
least and the largest value that its bits can hold, so that images of one scanner stay comparable. MONOCHROME1 is
inverted; of several frames the first is taken. pydicom reads the files, and is an extra.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from fedkeel.errors import DataError

ENDINGS = {".dcm", ".dicom"}
MARK = b"DICM"  # after 128 bytes


class MissingPackage(DataError):
    """The file may be good: it is no image that cannot be decoded."""


def is_dicom(content: Path | bytes) -> bool:
    """By its mark: scanners write files without an ending, or with a number after the last point."""
    if isinstance(content, bytes):
        return content[128:132] == MARK
    ending = content.suffix[1:].lower()
    if f".{ending}" in ENDINGS or ending.isalpha():
        return f".{ending}" in ENDINGS
    try:
        with content.open("rb") as file:
            return file.read(132)[128:] == MARK
    except OSError:
        return False


def read_dicom(content: Path | bytes) -> Image.Image:
    try:
        import pydicom
        from pydicom.pixels.processing import apply_color_lut
        from pydicom.pixels.utils import pixel_array
    except ImportError:
        raise MissingPackage(
            "DICOM is read with pydicom, which is not installed: pip install 'fedkeel[dicom]'."
        ) from None

    try:
        file = pydicom.dcmread(io.BytesIO(content) if isinstance(content, bytes) else content)
    except pydicom.errors.InvalidDicomError:
        raise DataError("it is no DICOM file") from None
    if "PixelData" not in file:
        raise DataError("it is a DICOM file without an image of whole numbers")
    pixels: npt.NDArray[Any] = pixel_array(file, index=0)
    kind, bits = file.PhotometricInterpretation, int(file.BitsStored)
    if kind == "PALETTE COLOR":
        pixels = apply_color_lut(pixels, file)
        bits = 8 * pixels.itemsize
    if pixels.ndim == 3:
        return Image.fromarray((pixels >> max(0, bits - 8)).astype(np.uint8))
    grey = _in_window(pixels.astype(np.float64), file, bits)
    return Image.fromarray(np.rint(255 * (1 - grey if kind == "MONOCHROME1" else grey)).astype(np.uint8))


def _in_window(pixels: npt.NDArray[np.float64], file: Any, bits: int) -> npt.NDArray[np.float64]:
    """Stored values as shares of white, by the formulas of PS3.3 C.11.2.1.2."""
    slope, intercept = _number(file, "RescaleSlope", 1.0), _number(file, "RescaleIntercept", 0.0)
    values = pixels * slope + intercept
    width = _number(file, "WindowWidth", 0.0)
    if width <= 0:
        least = -(2 ** (bits - 1)) if file.PixelRepresentation else 0
        ends = sorted(value * slope + intercept for value in (least, least + 2**bits - 1))
        return ((values - ends[0]) / (ends[1] - ends[0])).clip(0, 1)
    centre = _number(file, "WindowCenter", 0.0)
    function = str(_find(file, "VOILUTFunction") or "LINEAR")
    if function == "SIGMOID":
        return np.asarray(1 / (1 + np.exp((-4 * (values - centre) / width).clip(-500, 500))))
    if function == "LINEAR_EXACT":
        return ((values - centre) / width + 0.5).clip(0, 1)
    return ((values - (centre - 0.5)) / max(width - 1, 1e-9) + 0.5).clip(0, 1)


def _number(file: Any, name: str, otherwise: float) -> float:
    found = _find(file, name)
    first = found[0] if isinstance(found, list | tuple) or hasattr(found, "append") else found
    return otherwise if first is None or first == "" else float(first)


def _find(file: Any, name: str) -> Any:
    """Of the image, or of the first frame of one of the newer kinds with several."""
    if name in file:
        return file[name].value
    for groups in ("PerFrameFunctionalGroupsSequence", "SharedFunctionalGroupsSequence"):
        for element in file[groups].value[0] if groups in file and file[groups].value else ():
            if element.VR == "SQ" and element.value and name in element.value[0]:
                return element.value[0][name].value
    return None
