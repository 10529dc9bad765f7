"""DICOM files, written here by pydicom: as a viewer shows them at first."""

from __future__ import annotations

import builtins
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedkeel.data import load
from fedkeel.data.formats.dicom import is_dicom, read_dicom
from fedkeel.data.formats.images import decode
from fedkeel.errors import DataError
from tests.data.made_up import image

pydicom = pytest.importorskip("pydicom")


def dicom(pixels: np.ndarray, **tags: Any) -> bytes:
    """Grey values of 12 bits, unless tags say something else."""
    file = pydicom.Dataset()
    file.file_meta = pydicom.dataset.FileMetaDataset()
    file.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    file.file_meta.MediaStorageSOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    file.file_meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
    usual = {"SamplesPerPixel": 1, "PhotometricInterpretation": "MONOCHROME2", "PixelRepresentation": 0}
    usual |= {"BitsAllocated": 8 * pixels.itemsize, "BitsStored": 12, "Rows": pixels.shape[-2]}
    for name, value in {**usual, "Columns": pixels.shape[-1], **tags}.items():
        setattr(file, name, value)
    file.HighBit = file.BitsStored - 1
    file.PixelData = pixels.tobytes()
    stream = io.BytesIO()
    file.save_as(stream, enforce_file_format=True)
    return stream.getvalue()


def grey(*values: int, kind: Any = np.uint16, **tags: Any) -> list[int]:
    """How these values of a row are shown."""
    shown = np.asarray(read_dicom(dicom(np.array([values, values], kind), **tags)))
    return shown[0].tolist()


def test_without_a_window_black_and_white_are_what_the_bits_can_hold() -> None:
    assert grey(0, 2048, 4095) == [0, round(255 * 2048 / 4095), 255]
    assert grey(0, 4095, BitsStored=16) == [0, round(255 * 4095 / 65535)]
    assert grey(-2048, 0, 2047, kind=np.int16, PixelRepresentation=1) == [0, round(255 * 2048 / 4095), 255]
    # Slope and intercept move the ends along: an image of one scanner is not stretched by what it shows.
    assert grey(0, 2048, 4095, RescaleSlope=2, RescaleIntercept=-1024) == grey(0, 2048, 4095)


def test_monochrome1_is_inverted() -> None:
    shown = grey(0, 100, 4095, PhotometricInterpretation="MONOCHROME1")
    assert shown == [255 - value for value in grey(0, 100, 4095)]


def test_the_window_is_cut_from_rescaled_values() -> None:
    tags = {"RescaleSlope": 1, "RescaleIntercept": -1000, "WindowCenter": [40, 500], "WindowWidth": [401, 2000]}
    # 40 - 0.5 is half white, and 200 to each side are the ends.
    assert grey(0, 839, 940, 1040, 1140, 1240, 4000, **tags) == [0, 0, 64, 128, 192, 255, 255]
    exact = {"WindowCenter": 100, "WindowWidth": 200, "VOILUTFunction": "LINEAR_EXACT"}
    assert grey(0, 50, 100, 200, 300, **exact) == [0, 64, 128, 255, 255]
    assert grey(0, 100, 4095, **{**exact, "VOILUTFunction": "SIGMOID"}) == [30, 128, 255]


def test_a_window_of_the_newer_kinds_lies_with_the_frame() -> None:
    window = pydicom.Dataset()
    window.WindowCenter, window.WindowWidth = 100, 201
    frame = pydicom.Dataset()
    frame.FrameVOILUTSequence = [window]
    shown = grey(0, 200, 4000, SharedFunctionalGroupsSequence=[frame])
    assert shown == grey(0, 200, 4000, WindowCenter=100, WindowWidth=201)
    assert shown[1] == 255


def test_a_lookup_table_goes_before_the_window() -> None:
    table = pydicom.Dataset()
    table.LUTDescriptor, table.LUTData = [3, 0, 8], [10, 200, 90]
    table["LUTDescriptor"].VR = table["LUTData"].VR = "US"
    assert grey(0, 1, 2, 4000, VOILUTSequence=[table], WindowCenter=100, WindowWidth=201) == [10, 200, 90, 90]


def test_of_several_frames_the_first_and_colours_as_they_are() -> None:
    frames = np.stack([np.full((2, 3), value, np.uint16) for value in (0, 4095)])
    assert np.asarray(read_dicom(dicom(frames, NumberOfFrames=2))).tolist() == np.zeros((2, 3)).tolist()
    colours = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    tags = {"SamplesPerPixel": 3, "PhotometricInterpretation": "RGB", "PlanarConfiguration": 0, "BitsStored": 8}
    shown = read_dicom(dicom(colours, **tags, Rows=2, Columns=2))
    assert np.asarray(shown).tolist() == colours.tolist()


def test_a_file_is_known_by_its_mark_where_its_name_says_nothing(tmp_path: Path) -> None:
    content = dicom(np.full((4, 4), 4095, np.uint16))
    for name in ("IM0001", "1.2.840.113619.2", "scan.dcm", "scan.DICOM"):
        (tmp_path / name).write_bytes(content)
        assert is_dicom(tmp_path / name)
        assert decode(tmp_path / name, 2).tolist() == np.full((2, 2, 3), 255).tolist()
    (tmp_path / "notes").write_bytes(b"x" * 200)
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    assert not any(is_dicom(tmp_path / name) for name in ("notes", "a.png", "nowhere"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"no DICOM at all", "it is no DICOM file"),
        (dicom(np.zeros((4, 4), np.uint16))[:-8], "pixel data"),
        (dicom(np.zeros((4, 4), np.uint16))[:300], "without an image"),
    ],
)
def test_a_broken_file_is_refused_with_a_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "a.dcm").write_bytes(content)
    with pytest.raises(Exception, match=reason):
        decode(tmp_path / "a.dcm", 4)


def test_without_pydicom_the_extra_is_named_and_no_image_counts_as_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(150):
        image(tmp_path / "north" / "cat" / f"{number}.png")
    (tmp_path / "north" / "cat" / "a.dcm").write_bytes(dicom(np.zeros((4, 4), np.uint16)))
    whole = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("pydicom"):
            raise ImportError(name)
        return whole(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"pip install 'fedkeel\[dicom\]'"):
        load("folder", root=tmp_path, size=4)
