"""An .npz file: arrays `x_<domain>` and `y_<domain>`, and if there are any those of `<domain>_validation` and `_test`.

Images are uint8, (N, H, W, C), or (N, H, W) for grey ones, which keep one channel; other numbers are vectors, (N, D),
or float images, and are taken as they are. `classes` names the labels. An array `users_<domain>` says whose each sample
of `x_<domain>` is, for the partition `by-user`; `groups_<domain>` its patient, who is in one split.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedkeel.data import sources
from fedkeel.data.dataset import Dataset
from fedkeel.data.formats.arrays import Arrays, read_arrays
from fedkeel.data.own import Splits, as_dataset, as_labels
from fedkeel.data.reader import DATASETS, Fraction, Root, find_root
from fedkeel.errors import DataError

USES = ("validation", "test")


@DATASETS.register("npz")
def read_npz(root: Root = None, validation: Fraction = 0.15, test: Fraction = 0.25, split_seed: int = 0) -> Dataset:
    """Your own arrays, one .npz file with x_<domain> (uint8 images NHWC or NHW, or vectors) and y_<domain>.

    A domain with x_<domain>_test is tested on that; from another one the share `test` of each class is split off. So
    with x_<domain>_validation and the share `validation`.
    """
    if root is None:
        raise DataError("npz needs the path of the pack: give root=FILE.npz.")
    arrays = read_arrays(find_root("npz", root))
    domains = domains_of(arrays, root)
    stored = {domain: [name for name in (domain, *named(domain)) if f"x_{name}" in arrays] for domain in domains}
    order = [name for names in stored.values() for name in names]
    x = [sources.array(arrays[f"x_{name}"]) for name in order]
    for name, values in zip(order, x, strict=True):
        if values.shape[1:] != x[0].shape[1:] or values.dtype != x[0].dtype:
            raise DataError(
                f"x_{order[0]} has samples of shape {tuple(x[0].shape[1:])} and x_{name} of {tuple(values.shape[1:])}: "
                "store all of them with one size and number of channels."
            )
    sizes = [len(values) for values in x]
    owner = np.repeat(order, sizes)
    y = np.concatenate([labels_of(arrays, name, size) for name, size in zip(order, sizes, strict=True)])
    classes = [str(name) for name in arrays["classes"].tolist()] if "classes" in arrays else None
    labels, classes_found = as_labels(y, len(y), classes, None)
    splits = Splits(labels, test, validation, of_each(arrays, "groups", domains, owner), split_seed)
    splits.held, splits.tested = (np.isin(owner, [f"{domain}_{use}" for domain in domains]) for use in USES)
    parts = {domain: np.flatnonzero(np.isin(owner, names)) for domain, names in stored.items()}
    made = as_dataset("npz", sources.Samples(torch.cat(x), labels), labels, classes_found, parts, splits)
    return replace(made, users=of_each(arrays, "users", domains, owner))


def named(domain: str) -> list[str]:
    return [f"{domain}_{use}" for use in USES]


def domains_of(arrays: Arrays, root: Root) -> list[str]:
    stored = [key[2:] for key in arrays if key.startswith("x_")]
    parts = {part for name in stored for part in named(name)}
    domains = [name for name in stored if name not in parts]
    if not domains:
        raise DataError(f"'{root}' has no array named x_<domain>: store images as x_<domain>, labels as y_<domain>.")
    for name in domains:  # parts of a split, though nothing says of which domain, must not be trained on
        domain, _, use = name.rpartition("_")
        if use in USES and (domain or len(domains) > 1):
            raise DataError(
                f"The pack has x_{name} but no x_{domain or '<domain>'}: store a domain's images as x_<domain>, "
                "x_<domain>_validation and x_<domain>_test."
            )
    return domains


def labels_of(arrays: Arrays, name: str, samples: int) -> npt.NDArray[Any]:
    y = arrays.get(f"y_{name}")
    if y is None or y.shape != (samples,) or not np.issubdtype(y.dtype, np.integer):
        raise DataError(
            f"y_{name} must be stored with x_{name}: one whole number from 0 for each of its {samples} samples."
        )
    return y


def of_each(arrays: Arrays, what: str, domains: Sequence[str], owner: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """What `users_<domain>` or `groups_<domain>` say of each sample; those that are stored as for validation or testing
    get one that no other has."""
    own = {domain: arrays[f"{what}_{domain}"] for domain in domains if f"{what}_{domain}" in arrays}
    if not own:
        return None
    kinds = {array.dtype.kind for array in own.values()}
    whole = all(array.shape == (int((owner == domain).sum()),) for domain, array in own.items())
    if len(own) < len(domains) or not whole or not (kinds <= {"i", "u"} or kinds == {"U"}):
        raise DataError(
            f"The pack has {', '.join(f'{what}_{domain}' for domain in own)}: store {what}_<domain> for all of its "
            "domains or none, one for each sample of x_<domain>, and all as whole numbers or all as text."
        )
    if kinds == {"U"}:
        found = np.array([f"?{number}" for number in range(len(owner))], object)
    else:
        found = -1 - np.arange(len(owner))
    for domain, array in own.items():
        found[owner == domain] = array
    return found.astype(str) if kinds == {"U"} else found
