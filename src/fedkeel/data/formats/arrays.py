"""Files of many images: idx, MATLAB, libsvm, and the binaries of CIFAR and STL-10, in which older data sets come; npz;
and parquet.

Each function gives `Images`: the labels at once, the pixels when they are asked for. A file of another kind or length
is refused in one sentence. Pickles are never read.
"""

import bz2
import gzip
import math
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from fedkeel.data.dataset import Images, pixels
from fedkeel.data.formats.cache import Bytes
from fedkeel.data.formats.images import Encoded, decode_all
from fedkeel.data.formats.npz import fingerprint, read_arrays, write_arrays
from fedkeel.data.population import IntArray
from fedkeel.errors import DataError


def content(file: Path) -> bytes:
    """The bytes of a file, unpacked if it ends in .gz or .bz2."""
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(file.suffix, open)
    try:
        with opener(file, "rb") as stream:
            return bytes(stream.read())
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"'{file}' cannot be read ({error}): download it again.") from error


# -- idx, of MNIST --------------------------------------------------------------------------------------------
def idx(file: Path, dimensions: int) -> Bytes:
    """An array of bytes: two zero bytes, 8 for unsigned bytes, the number of dimensions, each as 4 bytes, the data."""
    raw = content(file)
    if raw[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(
            f"'{file}' begins with {raw[:4].hex(' ') or 'nothing'}, but an idx file of {dimensions} dimensions with "
            f"00 00 08 0{dimensions}: download it again."
        )
    shape = [int.from_bytes(raw[4 + 4 * i : 8 + 4 * i], "big") for i in range(dimensions)]
    data = np.frombuffer(raw[4 + 4 * dimensions :], np.uint8)
    if len(data) != math.prod(shape):
        raise DataError(
            f"'{file}' announces {' x '.join(map(str, shape))} bytes and has {len(data)}: download it again."
        )
    return data.reshape(shape)


def idx_images(name: str, images: Path, labels: Path) -> Images:
    y = checked(labels, idx(labels, 1).astype(np.int64), 10)
    x = idx(images, 3)
    if len(x) != len(y):
        raise DataError(f"'{images}' has {len(x)} images, but '{labels}' {len(y)} labels: download both again.")
    return pixels(name, images, y, x.shape[1], lambda: x)


# -- MATLAB, of SVHN and SynthDigits --------------------------------------------------------------------------
def mat_images(name: str, file: Path) -> Images:
    """`X` of shape (32, 32, 3, N) and `y`, in which SVHN writes the digit 0 as 10."""
    shapes = {key: shape for key, shape, _ in from_mat(file, "whosmat")}
    if "X" not in shapes or "y" not in shapes:
        raise DataError(
            f"'{file}' has {', '.join(sorted(shapes)) or 'nothing'} in it, but X and y are expected: download it again."
        )
    labels = np.asarray(from_mat(file, "loadmat", variable_names=["y"])["y"]).reshape(-1).astype(np.int64)
    shape = shapes["X"]
    if len(shape) != 4 or shape[2] != 3 or shape[0] != shape[1] or shape[3] != len(labels):
        raise DataError(
            f"X in '{file}' has the shape {shape} for {len(labels)} labels, but (32, 32, 3, {len(labels)}) is expected."
        )
    labels[labels == 10] = 0

    def read() -> Bytes:
        stored = from_mat(file, "loadmat", variable_names=["X"])["X"]
        return np.ascontiguousarray(stored.astype(np.uint8).transpose(3, 0, 1, 2))

    return pixels(name, file, checked(file, labels, 10), shape[0], read)


def from_mat(file: Path, function: str, **options: Any) -> Any:
    import scipy.io  # takes half a second, which only these files need

    try:
        return getattr(scipy.io, function)(file, **options)
    except NotImplementedError:
        raise DataError(
            f"'{file}' is MATLAB v7.3, which is not read: get the file in MATLAB v5, as the authors publish it."
        ) from None
    except Exception as error:  # scipy raises errors of many kinds for a broken file
        raise DataError(f"'{file}' cannot be read as a MATLAB file ({error}): download it again.") from error


# -- libsvm, of USPS ------------------------------------------------------------------------------------------
def libsvm_images(name: str, file: Path, side: int = 16) -> Images:
    """Lines `label index:value ...` with labels and indices from 1 and values x in [-1, 1]: (x + 1) / 2 * 255 here."""
    lines = [line.split() for line in content(file).decode("ascii", "replace").splitlines() if line.strip()]
    # In float32, as torchvision and FedBN do: rounding down must give their bytes.
    values = np.zeros((len(lines), side * side), np.float32)
    labels = np.zeros(len(lines), np.int64)
    for row, (label, *pairs) in enumerate(lines):
        try:
            labels[row] = int(float(label)) - 1
            for pair in pairs:
                place, _, value = pair.partition(":")
                values[row, int(place) - 1] = float(value)
        except (ValueError, IndexError) as error:
            raise DataError(
                f"Line {row + 1} of '{file}' is not in libsvm's form ({error}): download it again."
            ) from error
    images = ((values + 1) / 2 * 255).astype(np.uint8).reshape(-1, side, side)
    return pixels(name, file, checked(file, labels, 10), side, lambda: images)


# -- CIFAR and STL-10 -----------------------------------------------------------------------------------------
def cifar_images(name: str, file: Path, label_bytes: int, classes: int) -> Images:
    """Records of `label_bytes` labels, the last of which counts, and 3,072 pixels, channel after channel."""
    record = label_bytes + 3072
    raw = np.memmap(file, np.uint8, mode="r") if file.stat().st_size else np.empty(0, np.uint8)
    if len(raw) == 0 or len(raw) % record:
        raise DataError(
            f"'{file}' has {len(raw)} bytes, which is no number of {record}-byte records: download it again."
        )
    records = raw.reshape(-1, record)
    labels = checked(file, records[:, label_bytes - 1].astype(np.int64), classes)
    return pixels(name, file, labels, 32, lambda: records[:, label_bytes:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def stl_images(name: str, images: Path, labels: Path) -> Images:
    """96 x 96 pixels, channel after channel and in each one column after column; labels count from 1."""
    y = checked(labels, np.frombuffer(content(labels), np.uint8).astype(np.int64) - 1, 10)
    size = images.stat().st_size
    if size != len(y) * 3 * 96 * 96:
        raise DataError(
            f"'{images}' has {size} bytes, but {len(y)} images have {len(y) * 3 * 96 * 96}: download both again."
        )

    def read() -> Bytes:
        return np.fromfile(images, np.uint8).reshape(-1, 3, 96, 96).transpose(0, 3, 2, 1)

    return pixels(name, images, y, 96, read)


# -- npz, as Keras has MNIST ----------------------------------------------------------------------------------
def npz_images(name: str, file: Path) -> list[list[Images]]:
    """`x_train`, `y_train`, `x_test` and `y_test`: uint8 images (N, H, W) or (N, H, W, 3)."""
    arrays = read_arrays(file)
    both = []
    for use in ("train", "test"):
        x, y = arrays.get(f"x_{use}"), arrays.get(f"y_{use}")
        shapes = x is not None and x.dtype == np.uint8 and (x.ndim == 3 or (x.ndim == 4 and x.shape[3] in (1, 3)))
        if x is None or y is None or not shapes or len(x) != y.size or y.dtype.kind not in "iu":
            raise DataError(
                f"'{file}' needs uint8 images x_{use}, (N, H, W) or (N, H, W, 3), and their labels y_{use}, whole "
                "numbers."
            )
        square: Bytes = x[..., 0] if x.ndim == 4 and x.shape[3] == 1 else x
        labels = checked(file, y.reshape(-1).astype(np.int64), 10)
        side = x.shape[1] if x.shape[1] == x.shape[2] else 0
        both.append([pixels(f"{name}-{use}", file, labels, side, partial(np.asarray, square))])
    return both


# -- parquet, as on Hugging Face: a column `img` or `image` of {bytes, path}, and `label` or `fine_label` -------------
PLACES = (".", "data", "plain_text", "cifar100")


def parquet_files(folder: Path, use: str) -> list[Path]:
    """`train.parquet` or its pieces `train-00000-of-00002.parquet`, in the folder or where Hugging Face has them; or
    what a pack has in its place."""
    for place, ending in product(PLACES, (".parquet", ENCODED)):
        files = sorted((folder / place).glob(f"{use}{ending}")) or sorted((folder / place).glob(f"{use}-*{ending}"))
        if files:
            return files
    return []


def parquet_domain(name: str, folder: Path, classes: int) -> list[list[Images]]:
    """The training and the test images of one folder; nothing if it has no parquet files."""
    found = {use: parquet_files(folder, use) for use in ("train", "test")}
    both = []
    for use, files in found.items() if any(found.values()) else ():
        if not files:
            raise DataError(
                f"'{folder / use}.parquet' is missing: '{name}' needs train.parquet and test.parquet in every domain's "
                "folder."
            )
        both.append([encoded_images(name, file, classes) for file in files])
    return both


def encoded_images(name: str, file: Path, num_classes: int) -> Images:
    """The labels at once; the images when they are asked for."""
    labels, contents = (packed_rows if file.name.endswith(ENCODED) else parquet_rows)(file)
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= num_classes:
        raise DataError(
            f"The labels of '{file}' are not all from 0 to {num_classes - 1}: give the parquet of '{name}'."
        )

    def load(positions: IntArray, size: int) -> tuple[Bytes, IntArray]:
        key = fingerprint(file.absolute())
        rows = Encoded(name, str(file), key, len(labels), contents, lambda i: f"{file} row {i}")
        images, kept = decode_all(rows, size)
        if len(positions) == len(labels):
            return images, kept
        good = np.flatnonzero(np.isin(positions, kept))
        return images[np.searchsorted(kept, positions[good])], good

    return Images(labels, load=load)


Rows = tuple[IntArray, Callable[[], list[bytes]]]  # labels, none where they are not whole numbers; and encoded images


def from_parquet(file: Path, function: str, **options: Any) -> Any:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise DataError(
            f"'{file}' is read with pyarrow, which is not installed: pip install 'fedkeel[parquet]'."
        ) from None
    try:
        return getattr(parquet, function)(file, **options)
    except (ArrowException, OSError) as error:
        why = " ".join(str(error).split())
        raise DataError(f"'{file}' cannot be read as parquet ({why}): download it again.") from error


def parquet_rows(file: Path) -> Rows:
    """Images that are {bytes, path} or plain bytes."""
    schema = from_parquet(file, "read_schema")
    from pyarrow import types

    image = next((entry for entry in ("img", "image") if entry in schema.names), None)
    label = next((entry for entry in ("label", "fine_label") if entry in schema.names), None)
    if image is None or label is None:
        raise DataError(f"'{file}' has the columns {', '.join(schema.names)}: expected 'img' or 'image', and 'label'.")
    kind = schema.field(image).type
    in_struct = types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    if not (in_struct or types.is_binary(kind) or types.is_large_binary(kind)):
        raise DataError(f"The images of '{file}' are of the type {kind}: store them as {{bytes, path}} or as bytes.")
    numbers = from_parquet(file, "read_table", columns=[label])[label]
    whole = types.is_integer(numbers.type) and numbers.null_count == 0
    labels = np.asarray(numbers.to_numpy(), np.int64) if whole else np.empty(0, np.int64)

    def contents() -> list[bytes]:
        # An image that is null is one that cannot be decoded.
        rows = from_parquet(file, "read_table", columns=[image])[image].to_pylist()
        return [(row and row["bytes"] if in_struct else row) or b"" for row in rows]

    return labels, contents


# -- what `data pack --encoded` makes of parquet: as small, and read without pyarrow ----------------------------------
ENCODED = ".images.npz"


def write_encoded(file: Path, rows: Rows) -> None:
    labels, contents = rows
    every = contents()
    ends = np.cumsum([len(image) for image in every], dtype=np.int64)
    write_arrays(file, {"encoded": np.frombuffer(b"".join(every), np.uint8), "ends": ends, "labels": labels})


def packed_rows(file: Path) -> Rows:
    arrays = read_arrays(file)
    wanted = {"encoded": np.uint8, "ends": np.int64, "labels": np.int64}
    one_each = all(
        name in arrays and arrays[name].dtype == kind and arrays[name].ndim == 1 for name, kind in wanted.items()
    )
    ends = arrays["ends"] if one_each else np.empty(0, np.int64)
    bounds = np.concatenate([[0], ends])
    if (
        not one_each
        or len(ends) != len(arrays["labels"])
        or bounds[-1] != len(arrays["encoded"])
        or (np.diff(bounds) < 0).any()
    ):
        raise DataError(f"'{file}' is no file of encoded images: write it with 'fedkeel data pack NAME --encoded'.")
    return arrays["labels"], lambda: [arrays["encoded"][a:b].tobytes() for a, b in pairwise(bounds)]


# -- for all of them ------------------------------------------------------------------------------------------------
def checked(file: Path, labels: IntArray, classes: int) -> IntArray:
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= classes:
        raise DataError(f"'{file}' has labels that are not one of {classes} classes: give the file of this data set.")
    return labels


def first_file(folder: Path, names: Sequence[str]) -> Path | None:
    """The first of these files that is there; the names are tried with .gz and .bz2 too."""
    files = (folder / f"{name}{ending}" for name in names for ending in ("", ".gz", ".bz2"))
    return next((file for file in files if file.is_file()), None)
