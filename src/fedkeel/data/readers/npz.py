"""An .npz pack: arrays `x_<domain>` and `y_<domain>`, and if there are any those of `<domain>_validation` and `_test`.

Images are uint8, (N, H, W, C), or (N, H, W) for grey ones, which keep one channel. `classes` names the labels. An array
`users_<domain>` says whose each image of `x_<domain>` is, for the partition `by-user`.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedkeel.data import memory as room
from fedkeel.data.source import DATASETS, IntArray, Source, Split, find_root, fractions, indices, stratified_split
from fedkeel.data.transforms import parse_transforms
from fedkeel.errors import DataError

Arrays = dict[str, npt.NDArray[Any]]
SMALLER = "store smaller images, or fewer"


@DATASETS.register("npz")
def read_npz(
    root: str | os.PathLike[str] | None = None, validation: float = 0.15, test: float = 0.25, split_seed: int = 0
) -> Source:
    """Your own arrays, one .npz file with x_<domain> (uint8, NHWC or NHW) and y_<domain>.

    A domain with x_<domain>_test is tested on that; from another one the share `test` of each class is split off. So
    with x_<domain>_validation and the share `validation`.
    """
    fractions(validation, test)
    if root is None:
        raise DataError("npz needs the path of the pack: give root=FILE.npz.")
    arrays = read_arrays(os.fspath(find_root("npz", root, ())))
    stored = [key[2:] for key in arrays if key.startswith("x_")]
    uses = {f"{name}_{use}" for name in stored for use in ("validation", "test")}
    domains = [name for name in stored if name not in uses]
    if not domains:
        raise DataError(f"'{root}' has no array named x_<domain>: store images as x_<domain>, labels as y_<domain>.")
    refuse_parts_as_domains(domains)
    images: list[npt.NDArray[np.uint8]] = []  # parts, in the order of the store
    labels: list[IntArray] = []
    users: list[npt.NDArray[Any]] = []
    splits, start = {}, 0
    for domain in domains:
        x, y = images_and_labels(arrays, domain)
        if images:
            same_shape(f"x_{domains[0]}", images[0], f"x_{domain}", x)
        images.append(x)
        owners = users_of(arrays, domain, len(y))
        own = {use: f"{domain}_{use}" in stored for use in ("validation", "test")}
        shares = {"validation": 0 if own["validation"] else validation, "test": 0 if own["test"] else test}
        train, held, tested = stratified_split(y, **shares, seed=split_seed, purpose=domain)
        cuts = {"train": train, "validation": held, "test": tested}
        for use in (use for use, there in own.items() if there):
            x_more, y_more = images_and_labels(arrays, f"{domain}_{use}")
            same_shape(f"x_{domain}", x, f"x_{domain}_{use}", x_more)
            cuts[use] = len(y) + np.arange(len(y_more))
            images.append(x_more)
            y = np.concatenate([y, y_more])
            if owners is not None:  # nobody trains on these: whose they are does not matter
                owners = np.concatenate([owners, np.repeat(owners[:1], len(y_more))])
        splits[domain] = Split(**{use: indices(start + cut) for use, cut in cuts.items()})
        labels.append(y)
        users += [] if owners is None else [owners]
        start += len(y)
    all_labels = np.concatenate(labels)
    return Source(
        name="npz",
        images=torch.from_numpy(channels_first(images)),
        labels=torch.from_numpy(all_labels),
        classes=class_names(arrays, int(all_labels.max()), os.fspath(root)),
        domains=splits,
        train_transform=parse_transforms("normalise"),
        test_transform=parse_transforms("normalise"),
        users=all_users(domains, users),
    )


def channels_first(parts: Sequence[npt.NDArray[np.uint8]]) -> npt.NDArray[np.uint8]:
    """One array (N, C, H, W) of parts (n, H, W, C)."""
    height, width, channels = parts[0].shape[1:]
    store = np.empty((sum(map(len, parts)), channels, height, width), np.uint8)
    start = 0
    for part in parts:
        store[start : start + len(part)] = part.transpose(0, 3, 1, 2)
        start += len(part)
    return store


def refuse_parts_as_domains(domains: Sequence[str]) -> None:
    """Names that are meant as parts of a split, though nothing says of which domain: they must not be trained on."""
    for name in domains:
        domain, _, use = name.rpartition("_")
        if use in ("validation", "test") and (domain or len(domains) > 1):
            wanted = f"x_{domain}" if domain else "x_<domain>"
            raise DataError(
                f"The pack has x_{name} but no {wanted}: store a domain's images as x_<domain>, x_<domain>_validation "
                "and x_<domain>_test."
            )


def read_arrays(path: str) -> Arrays:
    problem = "it is no .npz file"
    try:
        if zipfile.is_zipfile(path):  # what else NumPy reads are single arrays and pickles
            with zipfile.ZipFile(path) as archive:
                content = sum(entry.file_size for entry in archive.infolist())
            what = f"The arrays of '{path}'"
            room.require(2 * content, what, SMALLER)  # as they are stored, and with channels first
            with room.needed_for(what, SMALLER), np.load(path, allow_pickle=False) as pack:
                return {key: pack[key] for key in pack.files}
    except DataError:  # a ValueError too
        raise
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        problem = str(error)
    raise DataError(f"'{path}' cannot be read as an .npz pack of plain arrays ({problem}): write it with np.savez.")


def images_and_labels(arrays: Arrays, name: str) -> tuple[npt.NDArray[np.uint8], IntArray]:
    """x_<name> as NHWC and y_<name> as int64, checked."""
    x = arrays[f"x_{name}"]
    if x.dtype != np.uint8 or x.ndim not in (3, 4):
        raise DataError(
            f"x_{name} has dtype {x.dtype} and shape {x.shape}: store uint8 images as (N, H, W, C) or (N, H, W)."
        )
    if x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[3] > 4:
        raise DataError(f"x_{name} has shape {x.shape}, channels first: store images as (N, H, W, C).")
    if f"y_{name}" not in arrays:
        raise DataError(f"The pack has x_{name} but no y_{name}: store its labels under that name.")
    y = arrays[f"y_{name}"]
    if y.shape != (len(x),) or not np.issubdtype(y.dtype, np.integer) or len(y) == 0 or y.min() < 0:
        raise DataError(
            f"y_{name} has dtype {y.dtype} and shape {y.shape} for {len(x)} images: "
            "store one whole number from 0 for each."
        )
    return x if x.ndim == 4 else x[..., None], y.astype(np.int64)


def users_of(arrays: Arrays, domain: str, samples: int) -> npt.NDArray[Any] | None:
    """users_<domain>, whole numbers or text, if the pack has it."""
    users = arrays.get(f"users_{domain}")
    if users is None:
        return None
    numbers = users.dtype.kind in "iu" and np.can_cast(users.dtype, np.int64)
    if users.shape != (samples,) or not (numbers or users.dtype.kind == "U"):
        raise DataError(
            f"users_{domain} has dtype {users.dtype} and shape {users.shape} for {samples} images: "
            "store a whole number (int64) or text for each."
        )
    return users.astype(np.int64) if numbers else users


def all_users(domains: Sequence[str], users: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any] | None:
    if not users:
        return None
    if len(users) < len(domains) or len({array.dtype.kind == "U" for array in users}) > 1:
        raise DataError(
            f"The pack has the domains {', '.join(domains)}: store users_<domain> for all of them or none, and all as "
            "whole numbers or all as text."
        )
    return np.concatenate(users)


def same_shape(first: str, one: npt.NDArray[np.uint8], second: str, other: npt.NDArray[np.uint8]) -> None:
    if one.shape[1:] != other.shape[1:]:
        (h, w, c), (h2, w2, c2) = one.shape[1:], other.shape[1:]
        raise DataError(
            f"{first} has images of {h} x {w} pixels with {c} channels and {second} of {h2} x {w2} with {c2}: "
            "store all of them with one size and number of channels."
        )


def class_names(arrays: Arrays, highest: int, path: str) -> tuple[str, ...]:
    if "classes" not in arrays:
        return tuple(str(label) for label in range(highest + 1))
    classes = tuple(str(name) for name in arrays["classes"].tolist())
    if len(classes) <= highest:
        raise DataError(f"'{path}' names {len(classes)} classes, but has the label {highest}: name every label.")
    return classes
