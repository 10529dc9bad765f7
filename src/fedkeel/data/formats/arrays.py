"""Files of many images: idx, MATLAB, libsvm, and the binaries of CIFAR and STL-10, in which older data sets come; npz;
and parquet.

Each function gives `Images`: the labels at once, the pixels when they are asked for. A file of another kind or length
is refused in one sentence. Pickles are never read.
"""

import bz2
import gzip
import io
import math
import zipfile
import zlib
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedkeel.data.dataset import Images
from fedkeel.data.population import IntArray
from fedkeel.data.store import Bytes
from fedkeel.errors import DataError

Arrays = dict[str, npt.NDArray[Any]]


def checked(file: Path, labels: IntArray, classes: int) -> IntArray:
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= classes:
        raise DataError(f"'{file}' has labels that are not one of {classes} classes: give the file of this data set.")
    return labels


def content(file: Path) -> bytes:
    """The bytes of a file, unpacked if it ends in .gz or .bz2."""
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(file.suffix, open)
    try:
        with opener(file, "rb") as stream:
            return bytes(stream.read())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{file}' cannot be read ({error}): download it again.") from error


def first_file(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of these files that is there; the names are tried with .gz and .bz2 too."""
    files = (folder / f"{name}{ending}" for name in names for ending in ("", ".gz", ".bz2"))
    return next((file for file in files if file.is_file()), None)


# -- idx, of MNIST -----------------------------------------------------------------------------------------------------
def idx(file: Path, dimensions: int) -> Bytes:
    """An array of bytes: two zero bytes, 8 for unsigned bytes, the number of dimensions, each as 4 bytes, the data."""
    raw = content(file)
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    data = np.frombuffer(raw[4 + 4 * dimensions :], np.uint8)
    if raw[:4] != bytes([0, 0, 8, dimensions]) or len(data) != math.prod(shape):
        raise DataError(f"'{file}' is not a whole idx file of bytes in {dimensions} dimensions: download it again.")
    return data.reshape(shape)


def idx_images(images: Path, labels: Path) -> Images:
    y = checked(labels, idx(labels, 1).astype(np.int64), 10)
    x = idx(images, 3)
    if len(x) != len(y):
        raise DataError(f"'{images}' has {len(x)} images, but '{labels}' {len(y)} labels: download both again.")
    return Images(y, [images], lambda: x)


# -- MATLAB, of SVHN and SynthDigits -----------------------------------------------------------------------------------
def mat_images(file: Path) -> Images:
    """`X` of shape (32, 32, 3, N) and `y`, in which SVHN writes the digit 0 as 10."""
    labels = from_mat(file, "y").reshape(-1).astype(np.int64)
    labels[labels == 10] = 0

    def read() -> Bytes:
        x = from_mat(file, "X")
        if x.ndim != 4 or x.shape[2:] != (3, len(labels)):
            raise DataError(f"X in '{file}' has the shape {x.shape}, but (32, 32, 3, {len(labels)}) is expected.")
        return np.asarray(x, np.uint8).transpose(3, 0, 1, 2)

    return Images(checked(file, labels, 10), [file], read)


def from_mat(file: Path, name: str) -> npt.NDArray[Any]:
    from scipy.io import loadmat  # takes half a second, which only these files need

    try:
        return np.asarray(loadmat(file, variable_names=[name])[name])
    except Exception as error:  # scipy raises errors of many kinds for a broken file
        raise DataError(
            f"'{file}' cannot be read as a file of MATLAB v5 with X and y ({error}): get it as the authors publish it."
        ) from error


# -- libsvm, of USPS ---------------------------------------------------------------------------------------------------
def libsvm_images(file: Path) -> Images:
    """Lines `label index:value ...` with labels from 1 and values x in [-1, 1]: (x + 1) / 2 * 255 here."""
    from sklearn.datasets import load_svmlight_file  # takes a second, which only these files need

    try:
        # In float32, as torchvision and FedBN do: rounding down must give their bytes.
        values, labels = load_svmlight_file(io.BytesIO(content(file)), n_features=256, dtype=np.float32)
    except ValueError as error:
        raise DataError(f"'{file}' is not in libsvm's form ({error}): download it again.") from error
    images = ((values.toarray() + 1) / 2 * 255).astype(np.uint8).reshape(-1, 16, 16)
    return Images(checked(file, labels.astype(np.int64) - 1, 10), [file], lambda: images)


# -- CIFAR and STL-10 --------------------------------------------------------------------------------------------------
def cifar_images(file: Path, label_bytes: int, classes: int) -> Images:
    """Records of `label_bytes` labels, the last of which counts, and 3,072 pixels, channel after channel."""
    record = label_bytes + 3072
    raw = np.fromfile(file, np.uint8)
    if len(raw) == 0 or len(raw) % record:
        raise DataError(
            f"'{file}' has {len(raw)} bytes, which is no number of {record}-byte records: download it again."
        )
    records = raw.reshape(-1, record)
    labels = checked(file, records[:, label_bytes - 1].astype(np.int64), classes)
    return Images(labels, [file], lambda: records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def stl_images(images: Path, labels: Path) -> Images:
    """96 x 96 pixels, channel after channel and in each one column after column; labels count from 1."""
    y = checked(labels, np.frombuffer(content(labels), np.uint8).astype(np.int64) - 1, 10)
    size = images.stat().st_size
    if size != len(y) * 3 * 96 * 96:
        raise DataError(
            f"'{images}' has {size} bytes, but {len(y)} images have {len(y) * 3 * 96 * 96}: download both again."
        )
    return Images(y, [images], lambda: np.fromfile(images, np.uint8).reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1))


# -- npz ---------------------------------------------------------------------------------------------------------------
def read_arrays(path: Path) -> Arrays:
    """A file from anywhere: plain arrays only, since a pickle can run any code."""
    problem = "it is no .npz file"
    try:
        if zipfile.is_zipfile(path):  # what else NumPy reads are single arrays and pickles
            with np.load(path, allow_pickle=False) as stored:
                return {key: stored[key] for key in stored.files}
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        problem = str(error)
    raise DataError(f"'{path}' cannot be read as an .npz pack of plain arrays ({problem}): write it with np.savez.")


# -- parquet, as on Hugging Face: a column `img` or `image` of {bytes, path}, and `label` or `fine_label` --------------
PLACES = (".", "data", "plain_text", "cifar100")


def parquet_files(folder: Path, use: str) -> list[Path]:
    """`train.parquet` or its pieces `train-00000-of-00002.parquet`, in the folder or where Hugging Face has them."""
    for place, name in product(PLACES, (f"{use}.parquet", f"{use}-*.parquet")):
        if files := sorted((folder / place).glob(name)):
            return files
    return []


def parquet_domain(name: str, folder: Path, classes: int) -> list[list[Images]]:
    """The training and the test images of one folder; nothing if it has no parquet files."""
    found = {use: parquet_files(folder, use) for use in ("train", "test")}
    for use, files in found.items() if any(found.values()) else ():
        if not files:
            raise DataError(
                f"'{folder / use}.parquet' is missing: '{name}' needs train.parquet and test.parquet in every domain's "
                "folder."
            )
    return [[parquet_images(file, classes) for file in files] for files in found.values() if files]


def from_parquet(file: Path, read: Callable[[Any], Any]) -> Any:
    """What `read` takes of pyarrow's `ParquetFile`."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(
            f"'{file}' is read with pyarrow, which is not installed: pip install 'fedkeel[parquet]'."
        ) from None
    try:
        with parquet.ParquetFile(file) as opened:
            return read(opened)
    except (ArrowException, OSError) as error:
        why = " ".join(str(error).split())
        raise DataError(f"'{file}' cannot be read as parquet ({why}): download it again.") from error


def parquet_images(file: Path, classes: int) -> Images:
    """Images that are {bytes, path} or plain bytes; one that is null cannot be decoded."""
    names = from_parquet(file, lambda opened: opened.schema_arrow.names)
    image = next((entry for entry in ("img", "image") if entry in names), None)
    label = next((entry for entry in ("label", "fine_label") if entry in names), None)
    if image is None or label is None:
        raise DataError(f"'{file}' has the columns {', '.join(names)}: expected 'img' or 'image', and 'label'.")
    given = from_parquet(file, lambda opened: opened.read([label]))[label].to_pylist()
    if not all(isinstance(number, int) for number in given):
        raise DataError(f"The labels of '{file}' are not whole numbers: give the file of this data set.")

    def contents() -> list[bytes]:
        rows = from_parquet(file, lambda opened: opened.read([image]))[image].to_pylist()
        plain = [row.get("bytes") if isinstance(row, dict) else row for row in rows]
        if not all(isinstance(row, bytes | None) for row in plain):
            raise DataError(f"The images of '{file}' are no encoded images: store them as {{bytes, path}} or as bytes.")
        return [row or b"" for row in plain]

    return Images(checked(file, np.array(given, np.int64), classes), [file], contents)
