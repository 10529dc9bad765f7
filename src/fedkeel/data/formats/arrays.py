"""Files of many images: idx, MATLAB, libsvm, and the binaries of CIFAR and STL-10, in which older data sets come; and
parquet.

Each function gives `Images`: the labels at once, the pixels when they are asked for. A file of another kind or length
is refused in one sentence. Pickles are never read.
"""

import bz2
import gzip
import io
import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedkeel.data.dataset import Images
from fedkeel.data.population import IntArray
from fedkeel.data.store import Bytes
from fedkeel.errors import DataError


def broken(file: Path, expected: str, error: object = "") -> DataError:
    why = " ".join(str(error).split())
    return DataError(
        f"'{file}' is not {expected}{f' ({why})' if why else ''}: get it as the data set's authors publish it."
    )


def checked(file: Path, labels: IntArray, classes: int) -> IntArray:
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= classes:
        raise broken(file, f"a file with labels of {classes} classes")
    return labels


def content(file: Path) -> bytes:
    """The bytes of a file, unpacked if it ends in .gz or .bz2."""
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(file.suffix, open)
    try:
        with opener(file, "rb") as stream:
            return bytes(stream.read())
    except (OSError, EOFError, zlib.error) as error:
        raise broken(file, "a whole file", error) from error


def packed_or_not(file: Path) -> Path:
    """The file, or what it is when it is packed, if that is there."""
    packed = (file.with_name(file.name + ending) for ending in (".gz", ".bz2"))
    return next((other for other in packed if other.is_file() and not file.is_file()), file)


# -- idx, of MNIST -----------------------------------------------------------------------------------------------------
def idx(file: Path, dimensions: int) -> Bytes:
    """An array of bytes: two zero bytes, 8 for unsigned bytes, the number of dimensions, each as 4 bytes, the data."""
    raw = content(file)
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    data = np.frombuffer(raw[4 + 4 * dimensions :], np.uint8)
    if raw[:4] != bytes([0, 0, 8, dimensions]) or len(data) != math.prod(shape):
        raise broken(file, f"a whole idx file of bytes in {dimensions} dimensions")
    return data.reshape(shape)


def idx_images(images: Path, labels: Path) -> Images:
    x, y = idx(images, 3), checked(labels, idx(labels, 1).astype(np.int64), 10)
    if len(x) != len(y):
        raise broken(images, f"of {len(y)} images, as '{labels}' says")
    return Images(y, [images], lambda: x)


# -- MATLAB, of SVHN and SynthDigits -----------------------------------------------------------------------------------
def mat_images(file: Path) -> Images:
    """`X` of shape (32, 32, 3, N) and `y`, in which SVHN writes the digit 0 as 10."""

    def read(name: str, shape: tuple[int, ...]) -> Any:
        from scipy.io import loadmat  # takes half a second, which only these files need

        try:
            return np.asarray(loadmat(file, variable_names=[name])[name]).reshape(shape)
        except Exception as error:  # scipy raises errors of many kinds for a broken file
            raise broken(file, "a file of MATLAB v5 with X, (32, 32, 3, N), and y", error) from error

    labels = read("y", (-1,)).astype(np.int64)
    labels[labels == 10] = 0
    pixels = (32, 32, 3, len(labels))
    return Images(checked(file, labels, 10), [file], lambda: read("X", pixels).astype(np.uint8).transpose(3, 0, 1, 2))


# -- libsvm, of USPS ---------------------------------------------------------------------------------------------------
def libsvm_images(file: Path) -> Images:
    """Lines `label index:value ...` with labels from 1 and values x in [-1, 1]: (x + 1) / 2 * 255 here."""
    from sklearn.datasets import load_svmlight_file  # takes a second, which only these files need

    try:
        # In float32, as torchvision and FedBN do: rounding down must give their bytes.
        values, labels = load_svmlight_file(io.BytesIO(content(file)), n_features=256, dtype=np.float32)
    except ValueError as error:
        raise broken(file, "in libsvm's form", error) from error
    images = ((values.toarray() + 1) / 2 * 255).astype(np.uint8).reshape(-1, 16, 16)
    return Images(checked(file, labels.astype(np.int64) - 1, 10), [file], lambda: images)


# -- CIFAR and STL-10 --------------------------------------------------------------------------------------------------
def cifar_images(file: Path, label_bytes: int, classes: int) -> Images:
    """Records of `label_bytes` labels, the last of which counts, and 3,072 pixels, channel after channel."""
    raw = np.fromfile(file, np.uint8)
    if len(raw) % (label_bytes + 3072):
        raise broken(file, f"of whole records of {label_bytes + 3072} bytes")
    records = raw.reshape(-1, label_bytes + 3072)
    labels = checked(file, records[:, label_bytes - 1].astype(np.int64), classes)
    return Images(labels, [file], lambda: records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def stl_images(images: Path, labels: Path) -> Images:
    """96 x 96 pixels, channel after channel and in each one column after column; labels count from 1."""
    y = checked(labels, np.frombuffer(content(labels), np.uint8).astype(np.int64) - 1, 10)
    if images.stat().st_size != len(y) * 3 * 96 * 96:
        raise broken(images, f"of {len(y)} images of 3 x 96 x 96 bytes")
    return Images(y, [images], lambda: np.fromfile(images, np.uint8).reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1))


# -- parquet, as on Hugging Face: a column `img` or `image` of {bytes, path}, and `label` or `fine_label` --------------
def parquet_domain(folder: Path, classes: int) -> list[list[Images]]:
    """The training and the test images of `train.parquet` and `test.parquet`, or of pieces of them such as
    `train-00000-of-00002.parquet`, in one folder or where Hugging Face has them; nothing if there are none."""
    for place in (folder, *(folder / name for name in ("data", "plain_text", "cifar100"))):
        found = [
            sorted(place.glob(f"{use}.parquet")) or sorted(place.glob(f"{use}-*.parquet")) for use in ("train", "test")
        ]
        if all(found):
            return [[parquet_images(file, classes) for file in files] for files in found]
        if any(found):
            raise DataError(
                f"'{place}' needs both train.parquet and test.parquet, and has one of them: get all of them."
            )
    return []


def from_parquet(file: Path, read: Callable[[Any], Any]) -> Any:
    """What `read` takes of pyarrow's `ParquetFile`."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(f"'{file}' is read with pyarrow: pip install 'fedkeel[parquet]'.") from None
    try:
        with parquet.ParquetFile(file) as opened:
            return read(opened)
    except (ArrowException, OSError) as error:
        raise broken(file, "a whole parquet file", error) from error


def parquet_images(file: Path, classes: int) -> Images:
    """Images that are {bytes, path} or plain bytes; one that is null cannot be decoded."""
    names = from_parquet(file, lambda opened: opened.schema_arrow.names)
    image, label = ([name for name in known if name in names] for known in (("img", "image"), ("label", "fine_label")))
    if not image or not label:
        raise DataError(f"'{file}' has the columns {', '.join(names)}: expected 'img' or 'image', and 'label'.")
    given = np.array(from_parquet(file, lambda opened: opened.read(label[:1]))[label[0]].to_pylist())
    if given.dtype.kind not in "iu":
        raise broken(file, "a file whose labels are whole numbers")

    def contents() -> list[bytes]:
        rows = from_parquet(file, lambda opened: opened.read(image[:1]))[image[0]].to_pylist()
        plain = [(row.get("bytes") if isinstance(row, dict) else row) or b"" for row in rows]
        if not all(isinstance(row, bytes) for row in plain):
            raise broken(file, "a file whose images are {bytes, path} or bytes")
        return plain

    return Images(checked(file, given.astype(np.int64), classes), [file], contents)
