"""An .npz file: arrays `x_<domain>` and `y_<domain>`, and if there are any those of `<domain>_validation` and `_test`.

Images are uint8, (N, H, W, C), or (N, H, W) for grey ones, which keep one channel. `classes` names the labels. An array
`users_<domain>` says whose each image of `x_<domain>` is, for the partition `by-user`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedkeel.data.dataset import Dataset, indices
from fedkeel.data.formats.arrays import Arrays, read_arrays
from fedkeel.data.population import IntArray, Split
from fedkeel.data.reader import DATASETS, Fraction, Root, find_root
from fedkeel.data.splits import check_shares, stratified_split
from fedkeel.data.store import Bytes
from fedkeel.errors import DataError

USES = ("validation", "test")


@DATASETS.register("npz")
def read_npz(root: Root = None, validation: Fraction = 0.15, test: Fraction = 0.25, split_seed: int = 0) -> Dataset:
    """Your own arrays, one .npz file with x_<domain> (uint8, NHWC or NHW) and y_<domain>.

    A domain with x_<domain>_test is tested on that; from another one the share `test` of each class is split off. So
    with x_<domain>_validation and the share `validation`.
    """
    check_shares(validation, test)
    if root is None:
        raise DataError("npz needs the path of the pack: give root=FILE.npz.")
    arrays = read_arrays(find_root("npz", root))
    domains = domains_of(arrays, root)
    parts: dict[str, tuple[Bytes, IntArray]] = {}  # by name, in the order of the store
    users: list[npt.NDArray[Any]] = []
    splits, start = {}, 0
    for domain in domains:
        own = [use for use in USES if f"x_{domain}_{use}" in arrays]
        parts |= {name: images_and_labels(arrays, name) for name in (domain, *(f"{domain}_{use}" for use in own))}
        labels = parts[domain][1]
        drawn = {use: 0.0 if use in own else share for use, share in (("validation", validation), ("test", test))}
        parts_of = stratified_split(labels, **drawn, seed=split_seed, purpose=domain)
        cuts = dict(zip(("train", *USES), parts_of, strict=True))
        stop = len(labels)
        for use in own:
            cuts[use] = stop + np.arange(len(parts[f"{domain}_{use}"][1]))
            stop += len(cuts[use])
        splits[domain] = Split(**{use: indices(start + cut) for use, cut in cuts.items()})
        if f"users_{domain}" in arrays:
            users.append(users_of(arrays[f"users_{domain}"], domain, len(labels)))
            users.append(np.repeat(users[-1][:1], stop - len(labels)))  # nobody trains on these: any user will do
        start += stop
    refuse_two_shapes({name: x.shape[1:] for name, (x, _) in parts.items()})
    height, width, channels = parts[domains[0]][0].shape[1:]
    store = np.empty((start, channels, height, width), np.uint8)
    np.concatenate([x.transpose(0, 3, 1, 2) for x, _ in parts.values()], out=store)
    every = np.concatenate([y for _, y in parts.values()])
    return Dataset(
        name="npz",
        images=torch.from_numpy(store),
        labels=torch.from_numpy(every),
        classes=class_names(arrays, int(every.max()), root),
        domains=splits,
        users=all_users(domains, users),
    )


def domains_of(arrays: Arrays, root: Root) -> list[str]:
    stored = [key[2:] for key in arrays if key.startswith("x_")]
    uses = {f"{name}_{use}" for name in stored for use in USES}
    domains = [name for name in stored if name not in uses]
    if not domains:
        raise DataError(f"'{root}' has no array named x_<domain>: store images as x_<domain>, labels as y_<domain>.")
    for name in domains:  # parts of a split, though nothing says of which domain, must not be trained on
        domain, _, use = name.rpartition("_")
        if use in USES and (domain or len(domains) > 1):
            wanted = f"x_{domain}" if domain else "x_<domain>"
            raise DataError(
                f"The pack has x_{name} but no {wanted}: store a domain's images as x_<domain>, x_<domain>_validation "
                "and x_<domain>_test."
            )
    return domains


def images_and_labels(arrays: Arrays, name: str) -> tuple[Bytes, IntArray]:
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


def users_of(users: npt.NDArray[Any], domain: str, samples: int) -> npt.NDArray[Any]:
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
    if len(users) < 2 * len(domains) or len({array.dtype.kind == "U" for array in users}) > 1:
        raise DataError(
            f"The pack has the domains {', '.join(domains)}: store users_<domain> for all of them or none, and all as "
            "whole numbers or all as text."
        )
    return np.concatenate(users)


def refuse_two_shapes(shapes: Mapping[str, tuple[int, ...]]) -> None:
    first, (h, w, c) = next(iter(shapes.items()))
    for name, (h2, w2, c2) in shapes.items():
        if (h, w, c) != (h2, w2, c2):
            raise DataError(
                f"x_{first} has images of {h} x {w} pixels with {c} channels and x_{name} of {h2} x {w2} with {c2}: "
                "store all of them with one size and number of channels."
            )


def class_names(arrays: Arrays, highest: int, root: Root) -> tuple[str, ...]:
    if "classes" not in arrays:
        return tuple(str(label) for label in range(highest + 1))
    classes = tuple(str(name) for name in arrays["classes"].tolist())
    if len(classes) <= highest:
        raise DataError(f"'{root}' names {len(classes)} classes, but has the label {highest}: name every label.")
    return classes
