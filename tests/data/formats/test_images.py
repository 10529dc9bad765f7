"""Decoding: whatever an image file has in it becomes RGB or a sentence that names the file."""

from __future__ import annotations

import io
import logging
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedkeel.data import load
from fedkeel.data.formats.images import decode
from fedkeel.errors import DataError, FedkeelError
from tests.data.made_up import tree


def stored(image: Image.Image, format: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def pixel(image: Image.Image, format: str = "PNG", **options: object) -> list[int]:
    return decode(stored(image, format, **options), 1)[0, 0].tolist()


def test_transparency_lies_over_white_whatever_colour_is_hidden_under_it() -> None:
    for hidden in ((0, 0, 0), (255, 0, 0)):
        assert pixel(Image.new("RGBA", (4, 4), (*hidden, 0))) == [255, 255, 255]
    assert pixel(Image.new("RGBA", (4, 4), (200, 100, 0, 255))) == [200, 100, 0]
    half = pixel(Image.new("RGBA", (4, 4), (200, 100, 0, 128)))
    # 128 / 255 of the colour over white, rounded by Pillow to whole bytes.
    assert half == pytest.approx([255 + (c - 255) * 128 / 255 for c in (200, 100, 0)], abs=1)
    assert pixel(Image.new("LA", (4, 4), (0, 0))) == [255] * 3
    assert pixel(Image.new("RGBA", (4, 4), (9, 9, 9, 0)), "WEBP", lossless=True) == [255] * 3


def test_a_transparent_colour_of_a_palette_or_of_a_plain_image_is_white() -> None:
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 20, 30])
    assert pixel(palette) == [10, 20, 30]
    assert pixel(palette, transparency=1) == [255] * 3
    assert pixel(palette, transparency=bytes([255, 0])) == [255] * 3
    assert pixel(Image.new("RGB", (4, 4), (1, 2, 3)), transparency=(1, 2, 3)) == [255] * 3
    assert pixel(Image.new("L", (4, 4), 7), transparency=7) == [255] * 3


def test_every_other_kind_of_pixels_becomes_rgb() -> None:
    assert pixel(Image.new("1", (4, 4), 1)) == [255] * 3
    assert pixel(Image.new("L", (4, 4), 7)) == [7] * 3
    assert pixel(Image.fromarray(np.full((4, 4), 0x1234, np.uint16))) == [0x12] * 3
    red = pixel(Image.new("CMYK", (4, 4), (0, 255, 255, 0)), "JPEG", quality=100)
    assert red == pytest.approx([255, 0, 0], abs=4)


def test_an_image_is_turned_upright_as_its_exif_data_say() -> None:
    picture = np.zeros((4, 4, 3), np.uint8)
    picture[0, 0] = 255  # the upper left corner is white
    corners = {}
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        upright = decode(stored(Image.fromarray(picture), exif=exif), 4)[..., 0]
        corners[orientation] = tuple(int(i) for i in np.argwhere(upright == 255)[0])
    # Where EXIF's table says that row 0 and column 0 of the stored image lie.
    ends = {1: (0, 0), 2: (0, 3), 3: (3, 3), 4: (3, 0), 5: (0, 0), 6: (0, 3), 7: (3, 3), 8: (3, 0)}
    assert corners == ends


def test_floating_point_pixels_have_no_black_and_no_white() -> None:
    with pytest.raises(DataError, match="floating-point"):
        decode(stored(Image.new("F", (4, 4), 0.5), "TIFF"), 4)


def sixteen_bits(value: int, photometric: int) -> bytes:
    """A TIFF file of 2 x 2 grey pixels, in which white is zero if `photometric` is 0."""
    pixels = struct.pack("<4H", *[value] * 4)
    short, long = 3, 4
    tags = [(256, short, 2), (257, short, 2), (258, short, 16), (259, short, 1), (262, short, photometric)]
    tags += [(273, long, 8), (277, short, 1), (278, short, 2), (279, long, len(pixels))]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, content) for tag, kind, content in tags)
    return b"II*\0" + struct.pack("<I", 8 + len(pixels)) + pixels + struct.pack("<H", len(tags)) + entries + bytes(4)


def test_of_sixteen_bits_in_a_tiff_the_upper_eight_are_kept_and_white_may_be_zero() -> None:
    assert decode(sixteen_bits(0x1234, 1), 1)[0, 0].tolist() == [0x12] * 3
    assert decode(sixteen_bits(0x1234, 0), 1)[0, 0].tolist() == [255 - 0x12] * 3
    with pytest.raises(DataError, match="16 bits hold 0 to 65,535"):
        pixel(Image.fromarray(np.full((2, 2), 70_000, np.int32)), "TIFF")
    with pytest.raises(DataError, match="16 bits hold 0 to 65,535"):
        pixel(Image.fromarray(np.full((2, 2), -1, np.int32)), "TIFF")


def scans(root: Path, *largest: int, suffix: str = "tif") -> Path:
    """A domain and two classes of 16-bit grey images that go up to these values."""
    for number, value in enumerate(largest):
        file = root / "north" / ("ill", "well")[number % 2] / f"{number}.{suffix}"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.full((4, 4), value, np.uint16)
        pixels[0, 0] = value // 2
        Image.fromarray(pixels).save(file)
    return root


@pytest.mark.parametrize("suffix", ["tif", "png"])
@pytest.mark.parametrize("bits", [10, 12, 14])
def test_scans_of_few_bits_in_sixteen_are_told_by_file_until_their_bits_are_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bits: int, suffix: str
) -> None:
    top = 2**bits
    root = scans(tmp_path, *[top - 1, top // 2 + 9] * 4, suffix=suffix)
    for _ in range(2):  # the second time they are from the cache
        caplog.clear()
        load("folder", root=root, size=4)
        told = [message for message in caplog.messages if "come out dark" in message]
        assert len(told) == 1
        assert f"8 of the 8 grey images of 16 bits use at most {bits} of them" in told[0]
        assert f"{root / 'north' / 'ill' / '0'}.{suffix}" in told[0]
        assert f"give bits={bits}, as in folder(bits={bits})" in told[0]
    caplog.clear()
    seen = load("folder", root=root, size=4, bits=bits)
    assert sorted(set(seen.images[:, :, 3, 3].flatten().tolist())) == [128 if bits > 11 else 130, 255]
    load("folder", root=root, size=4, bits=16)  # they are of 16 bits and dark indeed
    assert not [message for message in caplog.messages if "come out dark" in message]


def test_dark_scans_among_bright_ones_are_told_and_bits_are_for_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = scans(tmp_path, 65_535, 40_000, 0, 20_000, 3_000, 65_000)
    load("folder", root=root, size=4)
    (told,) = (message for message in caplog.messages if "come out dark" in message)
    assert "1 of the 6 grey images of 16 bits use at most 12 of them" in told
    assert f"('{root / 'north' / 'ill' / '4.tif'}')" in told
    with pytest.raises(DataError, match=r"its pixels go from 32,767 to 65,535: 12 bits hold 0 to 4,095"):
        load("folder", root=root, size=4, bits=12)
    for bits in (7, 17):
        with pytest.raises(FedkeelError, match="from 8 to 16"):
            load("folder", root=root, size=4, bits=bits)


@pytest.mark.parametrize("format", ["TIFF", "GIF"])
def test_of_several_pages_or_frames_the_first_is_taken(format: str) -> None:
    first, second = Image.new("RGB", (4, 4), (200, 0, 0)), Image.new("RGB", (4, 4), (0, 200, 0))
    assert pixel(first, format, save_all=True, append_images=[second]) == [200, 0, 0]


def broken(root: Path, content: bytes) -> Path:
    file = root / "photo" / "dog" / "000.png"
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("kind", ["truncated", "text", "empty", "huge", "bomb"])
def test_an_image_that_cannot_be_decoded_is_named_with_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    root = tree(tmp_path, ("photo", "art"), ("cat", "dog"), 60)
    noise = stored(Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)))
    contents = {"truncated": noise[: len(noise) // 2], "text": b"hello", "empty": b"", "huge": noise, "bomb": noise}
    reasons = {
        "truncated": "truncated",
        "text": "no image of a kind",
        "empty": "no image of a kind",
        "bomb": "exceeds limit of 100 pixels",
    }
    file = broken(root, contents[kind])
    # The limit is Pillow's: with a warning above it, an error above twice of it. The other images have 24 pixels.
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", {"huge": 300, "bomb": 50}.get(kind, 10_000))
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        federation = load("folder", root=root, size=4)
    if kind == "huge":
        assert len(federation.images) == 240
        assert "cannot be decoded" not in caplog.text
        return
    assert f"1 of the 240 images of 'folder' cannot be decoded and are left out: '{file} (" in caplog.text
    assert reasons[kind] in caplog.text
