"""DICOM, in which hospitals have their images: one picture of eight bits, as a viewer shows it at first.

Grey values go through the file's lookup tables or its rescaling, and then through its window. Without a window, black
and white are the least and the largest value that its bits can hold, so that images of one scanner stay comparable.
MONOCHROME1 is inverted; of several frames the first is taken. pydicom reads the files, and is an extra.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedkeel.errors import DataError

ENDINGS = {".dcm", ".dicom"}
OF_A_FRAME = ("RescaleSlope", "RescaleIntercept", "WindowCenter", "WindowWidth", "VOILUTFunction")


class MissingPackage(DataError):
    """The file may be good: it is no image that cannot be decoded."""


def is_dicom(content: Path | bytes) -> bool:
    """By its mark: scanners write files without an ending, or with a number after the last point."""
    if isinstance(content, Path):
        ending = content.suffix.lower()
        if ending in ENDINGS or ending[1:].isalpha() or not content.is_file():
            return ending in ENDINGS
        with content.open("rb") as file:
            content = file.read(132)
    return content[128:132] == b"DICM"


def read_dicom(content: Path | bytes) -> Image.Image:
    try:
        import pydicom
        from pydicom.pixels.processing import apply_color_lut, apply_modality_lut, apply_voi_lut
        from pydicom.pixels.utils import pixel_array
    except ImportError:
        raise MissingPackage("DICOM is read with pydicom: pip install 'fedkeel[dicom]'.") from None
    try:
        file = pydicom.dcmread(io.BytesIO(content) if isinstance(content, bytes) else content)
    except pydicom.errors.InvalidDicomError:
        raise DataError("it is no DICOM file") from None
    if "PixelData" not in file:
        raise DataError("it is a DICOM file without an image of whole numbers")
    stored, bits = pixel_array(file, index=0), int(file.BitsStored)
    if file.PhotometricInterpretation == "PALETTE COLOR":
        stored = apply_color_lut(stored, file)
        bits = 8 * stored.itemsize
    if stored.ndim == 3:
        return Image.fromarray((stored >> max(0, bits - 8)).astype(np.uint8))
    lift(file)
    black, white = ends(file, bits)
    grey = (apply_voi_lut(apply_modality_lut(stored, file), file) - black) / (white - black)
    shown = 1 - grey if file.PhotometricInterpretation == "MONOCHROME1" else grey
    return Image.fromarray(np.rint(255 * shown.clip(0, 1)).astype(np.uint8))


def lift(file: Any) -> None:
    """The newer kinds of files say of each frame what the older ones say of the image: take it of the first frame."""
    for groups in ("PerFrameFunctionalGroupsSequence", "SharedFunctionalGroupsSequence"):
        for element in file[groups].value[0] if file.get(groups) else ():
            for name in OF_A_FRAME:
                if element.VR == "SQ" and element.value and name in element.value[0] and name not in file:
                    setattr(file, name, element.value[0][name].value)


def ends(file: Any, bits: int) -> tuple[float, float]:
    """What pydicom makes black and white of: the ends of the last lookup table, or of the rescaled bits."""
    tables = [file[name].value[0] for name in ("VOILUTSequence", "ModalityLUTSequence") if file.get(name)]
    if tables:
        return 0, 2 ** int(tables[0].LUTDescriptor[2]) - 1
    least = -(2 ** (bits - 1)) if file.PixelRepresentation else 0
    slope, intercept = float(file.get("RescaleSlope", 1)), float(file.get("RescaleIntercept", 0))
    low, high = (value * slope + intercept for value in (least, least + 2**bits - 1))
    return (low, high) if "WindowWidth" in file else (min(low, high), max(low, high))
