"""Write a data set, with its splits, as one .npz pack or as a tree of images: small, and read by `npz` and `folder`."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import numpy as np
from torch import Tensor

from fedkeel.core.naming import file_name
from fedkeel.data.formats.cache import Arrays
from fedkeel.data.source import Source, Split
from fedkeel.errors import DataError

log = logging.getLogger("fedkeel")

NOT_A_DOMAIN = ("splits", "__MACOSX")  # what 'folder' does not take for one


def pack(source: Source, out: str | os.PathLike[str]) -> Path:
    """`FILE.npz` gives one pack, anything else a folder DIR/<domain>/<class>/ with the lists DIR/splits/."""
    target = Path(out).expanduser()
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise DataError(f"'{target}' exists already: give a new name, or remove it first.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return write_npz(source, target) if target.suffix == ".npz" else write_tree(source, target)
    except OSError as error:
        raise DataError(f"'{target}' cannot be written ({error}): give a path that can be.") from error


def parts(split: Split) -> dict[str, Tensor]:
    return {"train": split.train, "validation": split.validation, "test": split.test}


def write_npz(source: Source, target: Path) -> Path:
    arrays: Arrays = {"classes": np.array(source.classes)}
    for domain in source.domains:
        whole, _, use = domain.rpartition("_")
        if use in ("validation", "test") and whole in source.domains:
            raise DataError(f"A pack would take the domain '{domain}' for a part of '{whole}': write a folder instead.")
        if "\0" in domain or domain.encode("utf-8", "replace").decode() != domain:
            raise DataError(f"The domain {domain!r} cannot be the name of an array: write a folder instead.")
    for domain, split in source.domains.items():
        for use, positions in parts(split).items():
            if use != "train" and len(positions) == 0:
                continue
            name = domain if use == "train" else f"{domain}_{use}"
            arrays[f"x_{name}"] = source.images[positions].permute(0, 2, 3, 1).numpy()
            arrays[f"y_{name}"] = source.labels[positions].numpy()
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.stem}-", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]  # a keyword could be `allow_pickle`, says mypy
        os.replace(temporary, target)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return target


def write_tree(source: Source, target: Path) -> Path:
    """PNG files, which lose nothing, and a list for each domain and use."""
    from PIL import Image

    for domain in source.domains:
        if domain in NOT_A_DOMAIN:
            raise DataError(f"A folder cannot have a domain called '{domain}': write one .npz file instead.")
    for name in dict.fromkeys([*source.domains, *source.classes]):
        if file_name(name) != name:
            log.warning("%r is no name of a folder: it is written, and will be read, as '%s'.", name, file_name(name))
    (target / "splits").mkdir(parents=True)
    classes = [file_name(label) for label in source.classes]
    for domain, split in ((file_name(name), split) for name, split in source.domains.items()):
        for label in classes:
            (target / domain / label).mkdir(parents=True)
        for use, positions in parts(split).items():
            if use == "validation" and len(positions) == 0:
                continue
            lines = []
            for index in positions.tolist():
                picture = source.images[index].permute(1, 2, 0).numpy()
                path = f"{domain}/{classes[int(source.labels[index])]}/{index:07d}.png"
                Image.fromarray(picture[..., 0] if picture.shape[2] == 1 else picture).save(target / path)
                lines.append(path)
            (target / "splits" / f"{domain}_{use}.txt").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    return target
