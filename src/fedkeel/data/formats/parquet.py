"""Parquet files as on Hugging Face: a column `img` or `image` of {bytes, path}, and `label` or `fine_label`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedkeel.data.formats.images import Bytes, decode_all
from fedkeel.data.formats.npz import fingerprint
from fedkeel.data.manifest import Images
from fedkeel.data.population import IntArray
from fedkeel.errors import DataError

PLACES = (".", "data", "plain_text", "cifar100")


def parquet_files(folder: Path, use: str) -> list[Path]:
    """`train.parquet` or its pieces `train-00000-of-00002.parquet`, in the folder or where Hugging Face has them."""
    for place in PLACES:
        files = sorted((folder / place).glob(f"{use}.parquet")) or sorted((folder / place).glob(f"{use}-*.parquet"))
        if files:
            return files
    return []


def parquet_domain(name: str, folder: Path, classes: int) -> tuple[list[Images], list[Images]]:
    """The training and the test images of one folder."""
    both = []
    for use in ("train", "test"):
        files = parquet_files(folder, use)
        if not files:
            raise DataError(
                f"'{folder / use}.parquet' is missing: '{name}' needs train.parquet and test.parquet in every domain's "
                "folder."
            )
        both.append([parquet_images(name, file, classes) for file in files])
    return both[0], both[1]


def parquet_images(name: str, file: Path, num_classes: int) -> Images:
    """The labels at once; the images, {bytes, path} or plain bytes, when they are asked for."""
    try:
        from pyarrow import ArrowException, parquet, types
    except ImportError:
        raise DataError(
            f"'{name}' is read with pyarrow, which is not installed: pip install 'fedkeel[parquet]'."
        ) from None

    def read(function: Callable[..., Any], **options: Any) -> Any:
        try:
            return function(file, **options)
        except (ArrowException, OSError) as error:
            why = " ".join(str(error).split())
            raise DataError(f"'{file}' cannot be read as parquet ({why}): download it again.") from error

    schema = read(parquet.read_schema)
    image = next((entry for entry in ("img", "image") if entry in schema.names), None)
    label = next((entry for entry in ("label", "fine_label") if entry in schema.names), None)
    if image is None or label is None:
        raise DataError(f"'{file}' has the columns {', '.join(schema.names)}: expected 'img' or 'image', and 'label'.")
    kind = schema.field(image).type
    in_struct = types.is_struct(kind) and kind.get_field_index("bytes") >= 0
    if not (in_struct or types.is_binary(kind) or types.is_large_binary(kind)):
        raise DataError(f"The images of '{file}' are of the type {kind}: store them as {{bytes, path}} or as bytes.")
    numbers = read(parquet.read_table, columns=[label])[label]
    whole = types.is_integer(numbers.type) and numbers.null_count == 0
    labels = np.asarray(numbers.to_numpy(), np.int64) if whole else np.empty(0, np.int64)
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= num_classes:
        raise DataError(
            f"The labels of '{file}' are not all from 0 to {num_classes - 1}: give the parquet of '{name}'."
        )

    def contents() -> list[bytes]:
        # An image that is null is one that cannot be decoded.
        rows = read(parquet.read_table, columns=[image])[image].to_pylist()
        return [(row and row["bytes"] if in_struct else row) or b"" for row in rows]

    def load(positions: IntArray, size: int) -> tuple[Bytes, IntArray]:
        key = fingerprint(file.absolute())
        images, kept = decode_all(name, key, len(labels), contents, lambda i: f"{file} row {i}", size)
        if len(positions) == len(labels):
            return images, kept
        good = np.flatnonzero(np.isin(positions, kept))
        return images[np.searchsorted(kept, positions[good])], good

    return Images(labels, load=load)
