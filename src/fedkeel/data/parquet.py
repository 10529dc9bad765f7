"""Parquet files as on Hugging Face: a column `img` or `image` of {bytes, path}, and `label` or `fine_label`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedkeel.data.cache import fingerprint
from fedkeel.data.images import Bytes, decode_all
from fedkeel.data.listing import Items
from fedkeel.data.source import IntArray
from fedkeel.errors import DataError

PLACES = (".", "data", "plain_text", "cifar100")


def parquet_files(folder: Path, use: str) -> list[Path]:
    """`train.parquet` or its pieces `train-00000-of-00002.parquet`, in the folder or where Hugging Face has them."""
    for place in PLACES:
        files = sorted((folder / place).glob(f"{use}.parquet")) or sorted((folder / place).glob(f"{use}-*.parquet"))
        if files:
            return files
    return []


def parquet_domain(name: str, folder: Path, classes: int) -> tuple[list[Items], list[Items]]:
    """The training and the test images of one folder."""
    both = []
    for use in ("train", "test"):
        files = parquet_files(folder, use)
        if not files:
            raise DataError(
                f"'{folder / use}.parquet' is missing: '{name}' needs train.parquet and test.parquet in every domain's "
                "folder."
            )
        both.append([parquet_items(name, file, classes) for file in files])
    return both[0], both[1]


def parquet_items(name: str, file: Path, num_classes: int) -> Items:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(
            f"'{name}' is read with pyarrow, which is not installed: pip install 'fedkeel[parquet]'."
        ) from None
    try:
        columns = parquet.read_schema(file).names
        image = next((column for column in ("img", "image") if column in columns), None)
        label = next((column for column in ("label", "fine_label") if column in columns), None)
        if image is None or label is None:
            raise DataError(f"'{file}' has the columns {', '.join(columns)}: expected 'img' or 'image', and 'label'.")
        labels = np.asarray(parquet.read_table(file, columns=[label])[label].to_numpy(), np.int64)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"'{file}' cannot be read as parquet ({error}): download it again.") from error
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= num_classes:
        raise DataError(
            f"The labels of '{file}' are not all from 0 to {num_classes - 1}: give the parquet of '{name}'."
        )

    def contents() -> list[bytes]:
        return [row["bytes"] for row in parquet.read_table(file, columns=[image])[image].to_pylist()]

    def load(positions: IntArray, size: int) -> tuple[Bytes, IntArray]:
        key = fingerprint(file.absolute())
        images, kept = decode_all(name, key, len(labels), contents, lambda i: f"{file} row {i}", size)
        if len(positions) == len(labels):
            return images, kept
        place = np.full(len(labels), -1)
        place[kept] = np.arange(len(kept))
        good = np.flatnonzero(place[positions] >= 0)
        return images[place[positions[good]]], good

    return Items(labels, load=load)
