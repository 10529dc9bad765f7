"""Write a data set, with its splits, as one .npz file or as a tree of images: small, and read by `npz` and `folder`."""

import logging
import os
import shutil
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from fedkeel.core.naming import file_name
from fedkeel.data.dataset import Dataset
from fedkeel.data.formats.arrays import ENCODED, parquet_rows, write_encoded
from fedkeel.data.formats.npz import Arrays, write_arrays
from fedkeel.data.population import USES
from fedkeel.errors import DataError

log = logging.getLogger("fedkeel")

NOT_A_DOMAIN = ("splits", "__MACOSX")  # what 'folder' does not take for one


def write(dataset: Dataset, out: str | os.PathLike[str]) -> Path:
    """`FILE.npz` gives one file, anything else a folder DIR/<domain>/<class>/ with the lists DIR/splits/."""
    target = free_place(out)
    try:
        if target.suffix == ".npz":
            write_arrays(target, as_arrays(dataset))
        else:
            write_tree(dataset, target)
    except OSError as error:
        raise DataError(f"'{target}' cannot be written ({error}): give a path that can be.") from error
    return target


def free_place(out: str | os.PathLike[str]) -> Path:
    target = Path(out).expanduser()
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise DataError(f"'{target}' exists already: give a new name, or remove it first.")
    return target


def as_arrays(dataset: Dataset) -> Arrays:
    arrays: Arrays = {"classes": np.array(dataset.classes)}
    for domain, split in dataset.domains.items():
        whole, _, use = domain.rpartition("_")
        if use in ("validation", "test") and whole in dataset.domains:
            raise DataError(f"A pack would take the domain '{domain}' for a part of '{whole}': write a folder instead.")
        if "\0" in domain or domain.encode("utf-8", "replace").decode() != domain:
            raise DataError(f"The domain {domain!r} cannot be the name of an array: write a folder instead.")
        for use, positions in zip(USES, split, strict=True):
            if use == "train" or len(positions):
                name = domain if use == "train" else f"{domain}_{use}"
                arrays[f"x_{name}"] = dataset.images[positions].permute(0, 2, 3, 1).numpy()
                arrays[f"y_{name}"] = dataset.labels[positions].numpy()
    return arrays


def write_tree(dataset: Dataset, target: Path) -> None:
    """PNG files, which lose nothing, and a list for each domain and use."""
    for domain in dataset.domains:
        if domain in NOT_A_DOMAIN:
            raise DataError(f"A folder cannot have a domain called '{domain}': write one .npz file instead.")
    for name in dict.fromkeys([*dataset.domains, *dataset.classes]):
        if file_name(name) != name:
            log.warning("%r is no name of a folder: it is written, and will be read, as '%s'.", name, file_name(name))
    (target / "splits").mkdir(parents=True)
    classes = [file_name(label) for label in dataset.classes]
    for domain, split in ((file_name(name), split) for name, split in dataset.domains.items()):
        for label in classes:
            (target / domain / label).mkdir(parents=True)
        for use, positions in zip(USES, split, strict=True):
            if use == "validation" and len(positions) == 0:
                continue
            lines = []
            for index in positions.tolist():
                picture = dataset.images[index].permute(1, 2, 0).numpy()
                path = f"{domain}/{classes[int(dataset.labels[index])]}/{index:07d}.png"
                Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture).save(target / path)
                lines.append(path)
            (target / "splits" / f"{domain}_{use}.txt").write_text("".join(f"{line}\n" for line in lines), "utf-8")


def write_encoded_copy(root: Path, out: str | os.PathLike[str], size: int | None = None) -> Path:
    """A data set's own folder to take along: images as they are stored, or no larger than `size` on their shorter side;
    parquet as files that need no pyarrow. Whatever reads the one reads the other."""
    target = free_place(out)
    try:
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            place = target / path.relative_to(root)
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".parquet":
                write_encoded(place.with_name(place.stem + ENCODED), parquet_rows(path))
            elif size is None or not shrink(path, place, size):
                shutil.copyfile(path, place)
    except OSError as error:
        raise DataError(f"'{target}' cannot be written ({error}): give a path that can be.") from error
    return target


def shrink(path: Path, place: Path, size: int) -> bool:
    """Write an image with a shorter side of `size` pixels; false if it is none, or not larger, or cannot be decoded."""
    try:
        with Image.open(path) as opened:
            share = size / min(opened.size)
            if share >= 1:
                return False
            image = ImageOps.exif_transpose(opened)  # what says which side is up is not written
            width, height = (max(1, round(side * share)) for side in image.size)
            smaller = image.resize((width, height), Image.Resampling.LANCZOS)
    except (UnidentifiedImageError, OSError):  # no image, or a broken one: as it is, for whoever reads it to tell of
        return False
    smaller.save(place, opened.format, quality=90)
    return True
