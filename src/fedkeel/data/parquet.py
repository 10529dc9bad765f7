"""Data sets in parquet files as on Hugging Face: a column `img` or `image` of {bytes, path}, and `label`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedkeel.data.cache import fingerprint
from fedkeel.data.images import decode_all
from fedkeel.data.source import (
    DATASETS,
    IntArray,
    Source,
    Split,
    find_root,
    fractions,
    indices,
    stratified_split,
    whole,
)
from fedkeel.data.transforms import parse_transforms
from fedkeel.errors import DataError

AnyPath = str | os.PathLike[str]
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


@DATASETS.register("cifar10", paper="Krizhevsky, 2009")
def read_cifar10(root: AnyPath | None = None, validation: float = 0.0, split_seed: int = 0) -> Source:
    """CIFAR-10: 50,000 + 10,000 images of 10 classes, one domain, with the official test set.

    The root has train.parquet and test.parquet. `validation` is a share of the training set, none by default.
    """
    folder = find_root("cifar10", root, ("cifar10",))
    return read_domains(
        "cifar10",
        {"cifar10": folder},
        CIFAR10_CLASSES,
        32,
        validation,
        split_seed,
        train="crop(padding=4)+flip+normalise(like=cifar10)",
        tested="normalise(like=cifar10)",
    )


@DATASETS.register("digits-five", paper="Peng et al., ICCV 2019 (arXiv:1812.01754); sizes and transforms of FedBN")
def read_digits_five(
    root: AnyPath | None = None, size: int = 28, validation: float = 0.0, split_seed: int = 0
) -> Source:
    """Digits-Five: 10 digits in MNIST, MNIST-M, SVHN, USPS and a synthetic set, each with its own test set.

    A domain is a folder root/<domain>/ with train.parquet and test.parquet, and is called as its folder is.
    """
    folder = find_root("digits-five", root, ("digits-five", "digits_five", "digits"))
    folders = {path.parent.name: path.parent for path in sorted(folder.glob("[!.]*/train.parquet"))}
    if not folders:
        raise DataError(f"There is no <domain>/train.parquet in '{folder}': give the root of digits-five.")
    classes = tuple("0123456789")
    return read_domains(
        "digits-five", folders, classes, size, validation, split_seed, train="normalise", tested="normalise"
    )


def read_domains(
    name: str,
    folders: dict[str, Path],
    classes: tuple[str, ...],
    size: int,
    validation: float,
    split_seed: int,
    *,
    train: str,
    tested: str,
) -> Source:
    """Read train.parquet and test.parquet of each domain into one store."""
    whole(f"size in {name}", size, 1)
    fractions(validation, 0.0)
    images: list[npt.NDArray[np.uint8]] = []
    labels: list[IntArray] = []
    domains, start = {}, 0
    for domain, folder in folders.items():
        x, y = read_file(name, folder / "train.parquet", size, len(classes))
        x_test, y_test = read_file(name, folder / "test.parquet", size, len(classes))
        training, held, _ = stratified_split(y, validation=validation, test=0, seed=split_seed, purpose=domain)
        end = start + len(y)
        domains[domain] = Split(indices(start + training), indices(start + held), indices(end + np.arange(len(y_test))))
        images += [x, x_test]
        labels += [y, y_test]
        start = end + len(y_test)
    return Source(
        name=name,
        images=torch.from_numpy(np.concatenate(images)),
        labels=torch.from_numpy(np.concatenate(labels)),
        classes=classes,
        domains=domains,
        train_transform=parse_transforms(train),
        test_transform=parse_transforms(tested),
    )


def read_file(name: str, file: Path, size: int, num_classes: int) -> tuple[npt.NDArray[np.uint8], IntArray]:
    """The images (N, 3, size, size) and labels of one parquet file."""
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise DataError(
            f"'{name}' is read with pyarrow, which is not installed: pip install 'fedkeel[parquet]'."
        ) from None
    if not file.is_file():
        raise DataError(f"'{file}' is missing: '{name}' needs train.parquet and test.parquet in every domain's folder.")
    try:
        columns = parquet.read_schema(file).names
        column = next((c for c in ("img", "image") if c in columns), None)
        if column is None or "label" not in columns:
            raise DataError(f"'{file}' has the columns {', '.join(columns)}: expected 'img' or 'image', and 'label'.")
        labels = np.asarray(parquet.read_table(file, columns=["label"])["label"].to_numpy(), np.int64)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"'{file}' cannot be read as parquet ({error}): download it again.") from error
    if len(labels) == 0 or labels.min() < 0 or labels.max() >= num_classes:
        raise DataError(
            f"The labels of '{file}' are not all from 0 to {num_classes - 1}: give the parquet of '{name}'."
        )

    def contents() -> list[bytes]:
        return [row["bytes"] for row in parquet.read_table(file, columns=[column])[column].to_pylist()]

    key = fingerprint(file.absolute())
    images, kept = decode_all(name, key, len(labels), contents, lambda i: f"{file} row {i}", size)
    return images, labels[kept]
