"""Write a data set, with its splits, as one .npz file or as a tree of images: small, and read by `npz` and `folder`."""

import logging
import os
from pathlib import Path

import numpy as np
from PIL import Image

from fedkeel.core.naming import file_name
from fedkeel.data.dataset import Dataset
from fedkeel.data.formats.arrays import Arrays
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


def write_arrays(file: Path, arrays: Arrays) -> None:
    """Under a temporary name and renamed, so that another process never sees half a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.writing")
    try:
        with aside.open("wb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]  # a keyword could be `allow_pickle`, says mypy
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)


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
