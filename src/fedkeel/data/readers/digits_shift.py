"""digits-shift, the embedded default: real handwritten digits that look different on every client; and digits, which
has them all in one look, for shifts of the labels alone.

The 1,797 digits of scikit-learn (8 x 8 pixels, Alpaydin and Kaynak, 1998), dealt without overlap to five domains in
the manner of Digits-Five: each digit is in one domain only. Drawn at 32 x 32 in colour when loaded, and the same
bits on every machine: all arithmetic is on integers, and the random numbers are the generator's raw 64-bit words.
A style draws (N, 8, 8) ink values 0 to 16 as (N, 3, 32, 32) uint8.
"""

import gzip
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedkeel import seeds
from fedkeel.data.dataset import Dataset, indices
from fedkeel.data.population import IntArray, Split
from fedkeel.data.reader import DATASETS
from fedkeel.data.store import Bytes
from fedkeel.errors import DataError

SIDE = 32
TEST_PER_CLASS = 9
VALIDATION_PER_CLASS = 5


@DATASETS.register("digits-shift", paper="Digits of Alpaydin and Kaynak (UCI, 1998); domains after Digits-Five")
@cache
def read_digits_shift() -> Dataset:
    """Embedded: 1,797 real handwritten digits in five domains that look different (32 px, nothing to download)."""
    glyphs, labels = read_glyphs()
    images = np.zeros((len(labels), 3, 32, 32), np.uint8)
    domains = {}
    owners = deal_to_domains(labels)
    for number, (name, style) in enumerate(STYLES.items()):
        members = np.flatnonzero(owners == number)
        images[members] = style(glyphs[members], RandomNumbers(seeds.numpy_generator(0, "digits-shift", name)))
        domains[name] = fixed_split(members, labels[members])
    return Dataset(
        name="digits-shift",
        images=torch.from_numpy(images),
        labels=torch.from_numpy(labels),
        classes=tuple("0123456789"),
        domains=domains,
    )


@DATASETS.register("digits", paper="Alpaydin and Kaynak (UCI, 1998)")
@cache
def read_digits() -> Dataset:
    """Embedded: the same 1,797 digits in one look, white on black, for label shift (32 px, nothing to download)."""
    glyphs, labels = read_glyphs()
    images = scan(glyphs, RandomNumbers(seeds.numpy_generator(0, "digits", "scan")))
    return Dataset(
        name="digits",
        images=torch.from_numpy(images),
        labels=torch.from_numpy(labels),
        classes=tuple("0123456789"),
        domains={"scan": fixed_split(np.arange(len(labels)), labels, len(STYLES))},
    )


def read_glyphs() -> tuple[IntArray, IntArray]:
    """The digits (N, 8, 8) with values 0 to 16 and their labels, from the installed scikit-learn."""
    # Importing sklearn.datasets takes a second; the file alone does not.
    found = importlib.util.find_spec("sklearn")
    file = Path(found.origin if found and found.origin else "").parent / "datasets" / "data" / "digits.csv.gz"
    if not file.is_file():
        raise DataError(f"The digits of scikit-learn are not at '{file}': install scikit-learn 1.4 or newer.")
    with gzip.open(file, "rt") as lines:
        table = np.array([line.split(",") for line in lines], dtype=np.int64)
    return table[:, :64].reshape(-1, 8, 8), table[:, 64].copy()


def deal_to_domains(labels: IntArray) -> IntArray:
    """Each digit's domain: every class is dealt in turn, in an order of its own."""
    owners = np.zeros(len(labels), np.int64)
    draws = RandomNumbers(seeds.numpy_generator(0, "digits-shift", "domains"))
    for label in range(10):
        members = np.flatnonzero(labels == label)
        order = np.argsort(draws.words(len(members)), kind="stable")
        # Starting at another domain for each class keeps the domains' sizes alike.
        owners[members[order]] = (np.arange(len(members)) + label) % len(STYLES)
    return owners


def fixed_split(members: IntArray, labels: IntArray, times: int = 1) -> Split:
    """The same number of each class for testing and for validation, the rest for training; `times` as many of both.

    `members` are in the order of the data set, in which a writer's digits lie together. Taking the test digits
    from places spread over it keeps all writers in all three.
    """
    held = times * (TEST_PER_CLASS + VALIDATION_PER_CLASS)
    # Of 14 places, 9 are for testing, evenly spread: those where floor(9 t / 14) steps.
    tested = np.diff(np.arange(held + 1) * (times * TEST_PER_CLASS) // held) > 0
    parts = []
    for own in (members[labels == label] for label in range(10)):
        places = np.arange(held) * len(own) // held
        parts.append((np.delete(own, places), own[places[~tested]], own[places[tested]]))
    return Split(*(indices(np.sort(np.concatenate(part))) for part in zip(*parts, strict=True)))


class RandomNumbers:
    """Random whole numbers from a generator's raw words, whose stream NumPy never changes."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.bits = generator.bit_generator

    def words(self, *shape: int) -> IntArray:
        """Uniform numbers of 63 bits."""
        raw = self.bits.random_raw(int(np.prod(shape)))
        return (np.asarray(raw, np.uint64) >> np.uint64(1)).astype(np.int64).reshape(shape)

    def between(self, low: int, high: int, *shape: int) -> IntArray:
        """Uniform numbers from `low` to `high`, both included."""
        return low + self.words(*shape) % (high - low + 1)


def scan(glyphs: IntArray, draws: RandomNumbers) -> Bytes:
    """White ink on black, as scanned."""
    ink = place(outline(glyphs, level=8, softness=6), *shifts(draws, len(glyphs), 2))
    return to_bytes(np.repeat(ink[:, None], 3, axis=1))


def paper(glyphs: IntArray, draws: RandomNumbers) -> Bytes:
    """Dark ink on paper of a bright colour, each sheet another one."""
    count = len(glyphs)
    ink = place(outline(glyphs, level=8, softness=4), *shifts(draws, count, 3))[:, None]
    sheet = bright_colour(draws, count)[:, :, None, None] + draws.between(-9, 9, count, 1, SIDE, SIDE)
    pen = draws.between(0, 70, count, 3)[:, :, None, None]
    return to_bytes((sheet * (255 - ink) + pen * ink) // 255)


def texture(glyphs: IntArray, draws: RandomNumbers) -> Bytes:
    """The difference |digit - texture| over a colourful texture, as MNIST-M does with photographs."""
    count = len(glyphs)
    ink = place(outline(glyphs, level=8, softness=4), *shifts(draws, count, 2))[:, None]
    coarse = enlarge(draws.between(0, 255, count, 3, 5, 5), 8)[:, :, 4 : 4 + SIDE, 4 : 4 + SIDE]
    fine = enlarge(draws.between(-60, 60, count, 3, 18, 18), 2)[:, :, 2 : 2 + SIDE, 2 : 2 + SIDE]
    # In the middle of the range a difference to white looks like the texture itself: stay on one side of it.
    dark = (coarse * 2) // 5 + fine // 2
    side = draws.between(0, 1, count, 3)[:, :, None, None]
    ground = np.clip(np.where(side == 1, 255 - dark, dark), 0, 255)
    return to_bytes(abs(ink - ground))


def stroke(glyphs: IntArray, draws: RandomNumbers) -> Bytes:
    """A thin line in pencil on white: the digit's skeleton, slanted a little."""
    count = len(glyphs)
    # Less of the neighbours' ink: small holes open, faint lines stay.
    sharp = np.clip(3 * glyphs - 2 * blur(glyphs[:, None], 1)[:, 0], 0, 16)
    skeleton = thin(outline(sharp, level=6, softness=1, scale=6) > 127)
    # One pixel of the fine drawing is half a pixel of the picture: a soft line, thinner than any other domain's.
    fine = skeleton[:, None].astype(np.int64) * 255
    line = blur(fine, 1)[:, 0] * 3
    ink = slant(place(halve(line), *shifts(draws, count, 2)), draws.between(-3, 3, count))[:, None]
    ink = np.minimum(ink, 255)
    sheet = 246 + draws.between(-6, 6, count, 1, SIDE, SIDE)
    pencil = draws.between(60, 130, count, 1)[:, :, None, None]
    return to_bytes(np.repeat((sheet * (255 - ink) + pencil * ink) // 255, 3, axis=1))


def street(glyphs: IntArray, draws: RandomNumbers) -> Bytes:
    """A house number in the street, as in SVHN: coloured, shaded, blurred, with neighbours cut at the edges."""
    count = len(glyphs)
    strokes = outline(glyphs, level=7, softness=5)
    ink = place(strokes, *shifts(draws, count, 1))
    for direction in (-1, 1):
        neighbour = strokes[draws.between(0, count - 1, count)]
        away = direction * draws.between(17, 21, count)
        ink = np.maximum(ink, place(neighbour, draws.between(-2, 2, count), away))
    wall = draws.between(20, 235, count, 3)
    contrast = draws.between(75, 130, count, 1) * np.where(wall.sum(axis=1, keepdims=True) > 3 * 127, -1, 1)
    paint = np.clip(wall + contrast + draws.between(-25, 25, count, 3), 0, 255)
    slope = draws.between(-2, 2, count, 1, 2)[..., None, None]
    rows, columns = np.arange(SIDE)[:, None] - SIDE // 2, np.arange(SIDE) - SIDE // 2
    shade = slope[:, :, 0] * rows + slope[:, :, 1] * columns
    ink = ink[:, None]
    picture = (wall[:, :, None, None] * (255 - ink) + paint[:, :, None, None] * ink) // 255 + shade
    return to_bytes(blur(np.clip(picture, 0, 255), 2) + draws.between(-8, 8, count, 1, SIDE, SIDE))


STYLES: dict[str, Callable[[IntArray, RandomNumbers], Bytes]] = {
    style.__name__: style for style in (scan, paper, texture, stroke, street)
}


def outline(glyphs: IntArray, *, level: int, softness: int, scale: int = 3) -> IntArray:
    """The digit enlarged, with a border that is `softness` sixteenths of ink wide around `level`: 0 to 255."""
    padded = np.pad(glyphs, ((0, 0), (1, 1), (1, 1)))
    whole = enlarge(padded * 256, scale)[:, scale:-scale, scale:-scale]
    low = 256 * level - 128 * softness
    return np.clip((whole - low) * 255 // (256 * softness), 0, 255)


def enlarge(x: IntArray, scale: int) -> IntArray:
    """Bilinear enlargement of the last two axes by a whole number."""
    for axis in (-1, -2):
        x = np.moveaxis(x, axis, -1)
        padded = np.concatenate([x[..., :1], x, x[..., -1:]], axis=-1)
        target = np.arange(x.shape[-1] * scale)
        # Twice the position in the small picture, in units of 1/scale, of the middle of each new pixel.
        position = 2 * target + 1 + scale
        left, part = position // (2 * scale), position % (2 * scale)
        mixed = padded[..., left] * (2 * scale - part) + padded[..., left + 1] * part
        x = np.moveaxis(mixed // (2 * scale), -1, axis)
    return x


def halve(x: IntArray) -> IntArray:
    """The mean of every 2 x 2 pixels."""
    return (x[..., ::2, ::2] + x[..., 1::2, ::2] + x[..., ::2, 1::2] + x[..., 1::2, 1::2]) // 4


def place(ink: IntArray, down: IntArray, right: IntArray) -> IntArray:
    """Put (N, h, w) pictures on black SIDE x SIDE ones: in the middle, moved `down` and `right`."""
    count, height, width = ink.shape
    top, left = (SIDE - height) // 2 + down, (SIDE - width) // 2 + right
    framed = np.pad(ink, ((0, 0), (SIDE, SIDE), (SIDE, SIDE)))
    rows, columns = (SIDE + np.arange(SIDE) - start[:, None] for start in (top, left))
    placed: IntArray = framed[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return placed


def slant(ink: IntArray, amount: IntArray) -> IntArray:
    """Move each row sideways, the top by `amount` to the right and the bottom to the left."""
    rows = np.arange(SIDE)
    offset = amount[:, None] * (SIDE // 2 - rows) // (SIDE // 2)
    columns = (np.arange(SIDE)[None, None, :] - offset[:, :, None]) % SIDE
    return np.take_along_axis(ink, columns, axis=2)


def shifts(draws: RandomNumbers, count: int, most: int) -> tuple[IntArray, IntArray]:
    return draws.between(-most, most, count), draws.between(-most, most, count)


def blur(x: IntArray, times: int) -> IntArray:
    """Mean over 3 x 3 pixels, repeated."""
    for _ in range(times):
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
        rows = padded[:, :, :-2] + padded[:, :, 1:-1] + padded[:, :, 2:]
        x = (rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]) // 9
    return x


def bright_colour(draws: RandomNumbers, count: int) -> IntArray:
    """Light colours, strongly tinted: one channel high, one low, one between, in any order."""
    levels = np.stack(
        [draws.between(215, 250, count), draws.between(120, 235, count), draws.between(60, 150, count)], axis=1
    )
    order = np.argsort(draws.words(count, 3), axis=1, kind="stable")
    return np.take_along_axis(levels, order, axis=1)


def thin(shape: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """The skeleton of (N, h, w) shapes, by the algorithm of Zhang and Suen (1984)."""
    shape = shape.copy()
    while True:
        before = shape.copy()
        for first in (True, False):
            around = np.pad(shape, ((0, 0), (1, 1), (1, 1)))
            # The eight neighbours, clockwise from the one above.
            n = [
                around[:, 1 + dy : around.shape[1] - 1 + dy, 1 + dx : around.shape[2] - 1 + dx]
                for dy, dx in ((-1, 0), (-1, 1), (0, 1), (1, 1), (1, 0), (1, -1), (0, -1), (-1, -1))
            ]
            filled = np.sum(n, axis=0, dtype=np.int8)
            turns = np.sum([~n[i] & n[(i + 1) % 8] for i in range(8)], axis=0, dtype=np.int8)
            up, right, down, left = n[0], n[2], n[4], n[6]
            if first:
                free = ~(up & right & down) & ~(right & down & left)
            else:
                free = ~(up & right & left) & ~(up & down & left)
            shape &= ~((filled >= 2) & (filled <= 6) & (turns == 1) & free)
        if (shape == before).all():
            return shape


def to_bytes(x: IntArray) -> Bytes:
    return np.clip(x, 0, 255).astype(np.uint8)
