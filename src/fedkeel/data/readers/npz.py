"""An .npz file: arrays `x_<domain>` and `y_<domain>`, and if there are any those of `<domain>_validation` and `_test`.

Images are uint8, (N, H, W, C), or (N, H, W) for grey ones, which keep one channel; other numbers are vectors, (N, D),
or float images, and are taken as they are. `classes` names the labels. An array `groups_<domain>` says whose patient
each sample of `x_<domain>` is, who is in one split.
"""

import zipfile
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedkeel.data.dataset import Dataset, indices
from fedkeel.data.own import as_labels, usual_transform
from fedkeel.data.population import Split
from fedkeel.data.reader import DATASETS, Fraction, Root, find_root
from fedkeel.data.sources import array
from fedkeel.data.splits import refuse_idle_seed, shares_of
from fedkeel.errors import DataError, quoted

Arrays = dict[str, npt.NDArray[Any]]
USES = ("validation", "test")


@DATASETS.register("npz")
def read_npz(root: Root = None, validation: Fraction = 0.15, test: Fraction = 0.25, split_seed: int = 0) -> Dataset:
    """Your own arrays, one .npz file with x_<domain> (uint8 images NHWC or NHW, or vectors) and y_<domain>.

    A domain with x_<domain>_test is tested on that; from another one the share `test` of each class is split off. So
    with x_<domain>_validation and the share `validation`.
    """
    arrays = read_arrays(root)
    stored = [key[2:] for key in arrays if key.startswith("x_")]
    domains = [name for name in stored if name not in [f"{domain}_{use}" for domain in stored for use in USES]]
    if others := [key for key in arrays if not key.startswith(("x_", "y_", "groups_")) and key != "classes"]:
        raise DataError(f"The arrays {quoted(others)} are not read: leave them out of '{root}'.")
    if not domains or any(name.endswith(USES) for name in domains):  # parts of no domain would be trained on
        raise DataError(
            f"'{root}' has x_{', x_'.join(domains)}: store a domain's images as x_<domain>, and what is held out as "
            "x_<domain>_validation and x_<domain>_test."
        )
    x, y, splits, start = list[torch.Tensor](), list[npt.NDArray[Any]](), dict[str, Split](), 0
    drawn = False
    for domain in domains:
        names = [name for name in (domain, f"{domain}_validation", f"{domain}_test") if name in stored]
        own = {name: array(arrays[f"x_{name}"]) for name in names}
        y += [of_each(arrays, f"y_{name}", len(own[name])) for name in names]
        groups = of_each(arrays, f"groups_{domain}", len(own[domain])) if f"groups_{domain}" in arrays else None
        shares = (0.0 if f"{domain}_validation" in own else validation, 0.0 if f"{domain}_test" in own else test)
        drawn |= any(shares)
        parts = list(shares_of(domain, y[-len(names)], None, groups, *shares, split_seed))
        end = len(own[domain])
        for number, name in enumerate((f"{domain}_{use}" for use in USES), start=1):
            if name in own:
                parts[number] = end + np.arange(len(own[name]))
                end += len(own[name])
        splits[domain] = Split(*(indices(start + part) for part in parts))
        x += own.values()
        start += end
    if {(values.shape[1:], values.dtype) for values in x} != {(x[0].shape[1:], x[0].dtype)}:
        shapes = " and ".join(sorted({str(tuple(values.shape[1:])) for values in x}))
        raise DataError(f"'{root}' has samples of the shapes {shapes}: store all with one size and number of channels.")
    refuse_idle_seed(split_seed, drawn=drawn)
    classes = [str(name) for name in arrays["classes"].tolist()] if "classes" in arrays else None
    labels, found = as_labels(np.concatenate(y), start, classes)
    usual = usual_transform(x[0])
    return Dataset("npz", torch.cat(x), torch.from_numpy(labels), found, splits, usual, usual)


def read_arrays(root: Root) -> Arrays:
    """A file from anywhere: plain arrays only, since a pickle can run any code."""
    if root is None:
        raise DataError("npz needs the path of the pack: give root=FILE.npz.")
    path, problem = find_root("npz", root), "it is no .npz file"
    try:
        if zipfile.is_zipfile(path):  # what else NumPy reads are single arrays and pickles
            with np.load(path, allow_pickle=False) as stored:
                return {key: stored[key] for key in stored.files}
    except (OSError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        problem = str(error)
    raise DataError(f"'{path}' cannot be read as an .npz pack of plain arrays ({problem}): write it with np.savez.")


def of_each(arrays: Arrays, name: str, samples: int) -> npt.NDArray[Any]:
    found = arrays.get(name, np.empty(0, np.int64))
    if found.shape != (samples,) or found.dtype.kind not in ("iuU" if name.startswith("groups_") else "iu"):
        raise DataError(
            f"{name} is {found.dtype} of shape {found.shape}: store a whole number for each of {samples:,}."
        )
    return found
