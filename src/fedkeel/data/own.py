"""A federation from data that are in Python already: arrays, tables, torch data sets, Hugging Face data sets.

    fedkeel.data.federation(images, labels, clients=hospital_of_each_image, groups=patient_of_each_image)
    fedkeel.data.federation(table, label="diagnosis", clients="hospital", test=0.3, unseen="clinic 4")
    fedkeel.data.federation(torchvision_set, partition="dirichlet(alpha=0.3, clients=10)")

What the samples are is `fedkeel.data.sources`' affair; here they get labels, clients and a split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedkeel.data.dataset import Dataset, indices
from fedkeel.data.federation import Federation
from fedkeel.data.load import Cut
from fedkeel.data.population import IntArray, Split
from fedkeel.data.sources import Source
from fedkeel.data.splits import refuse_idle_seed, shares_of
from fedkeel.errors import DataError, numbered, unknown
from fedkeel.options import Decay, checked, described
from fedkeel.spec import names

USES = ("validation", "test")


def federation(
    data: Any,
    labels: Any = None,
    *,
    clients: Any = None,
    domains: Any = None,
    groups: Any = None,
    test: Any = 0.2,
    validation: Any = 0.0,
    **options: Any,
) -> Federation:
    """A federation of your own data.

    Args:
        data: uint8 images (N, C, H, W), (N, H, W, C) or (N, H, W); float images (N, C, H, W) or vectors (N, D), taken
            as they are; a pandas table of features; a torch `Dataset` of (image, label), or a Hugging Face one.
        labels: of each sample, whole numbers from 0 or names; where the data have them, they are left out.
        clients: whose each sample is: a name for each, or a column's name. Without, `partition` cuts the data, domain
            by domain.
        domains: what each sample's domain is called (a column's name, too). By default a client is a domain of its own.
        groups: the patient of each sample, or a column's name: no group is in two splits of a client.
        test, validation: the share of each client's samples, by class; or true or false for each, or a column of that.
        options: those of `Source`, how the data are read (`name`, `image`, `label`, `classes`, `size`, `split_seed`),
            and those of `Cut`, as in `fedkeel.data.load` (`partition`, `unseen`, `seed`, `train_transform`, ...).

    >>> images, labels = np.zeros((60, 8, 8), np.uint8), np.arange(60) % 3
    >>> federation(images, labels, clients=["north", "south"] * 30, test=0.2)["north"].samples
    24
    """
    source, cut = read_options(options)
    if clients is not None and options.get("partition") is not None:
        raise DataError("'clients' says whose each sample is, and 'partition' would cut them anew: keep one.")
    if clients is None and domains is None and options.get("partition") is None:
        raise DataError("Whose the samples are is not said: give clients=..., or partition='even(clients=10)'.")
    said = {"client": clients, "domain": domains, "group": groups, "test": test, "validation": validation}
    samples = source.read(data, labels, [given for given in said.values() if isinstance(given, str)])
    count = len(samples.values)
    each = {
        what: each_of(samples.column(given) if isinstance(given, str) else given, count, what)
        for what, given in said.items()
        if given is not None and not (what in USES and isinstance(given, int | float))
    }
    for use in (use for use in USES if use in each and each[use].dtype.kind != "b"):
        raise DataError(f"'{use}' is {described(said[use])}: give a share below 1, or true or false for each sample.")
    y, classes = as_labels(samples.labels, count, source.classes, samples.classes)
    owner = each.get("client", each.get("domain", np.full(count, source.name)))
    found, place = np.unique(owner, return_inverse=True)
    members = np.split(np.argsort(place, kind="stable"), np.cumsum(np.bincount(place))[:-1])
    parts = dict(zip(map(str, found.tolist()), members, strict=True))
    splits = splits_of(parts, y, each, said, source.split_seed)
    usual = usual_transform(samples.values)
    dataset = Dataset(source.name, samples.values, torch.from_numpy(y), classes, splits, usual, usual)
    dataset = replace(dataset, columns=samples.columns)
    if "client" not in each:
        return cut.federation(dataset)
    domain_of = {
        name: name if "domain" not in each else one_domain(name, each["domain"][own]) for name, own in parts.items()
    }
    return with_clients(dataset, cut, domain_of)


def read_options(options: Mapping[str, Any]) -> tuple[Source, Cut]:
    of_source, of_cut = ([field.name for field in fields(kind)] for kind in (Source, Cut))
    for option in options:
        if option not in (*of_source, *of_cut):
            own = ("clients", "domains", "groups", "test", "validation")
            raise DataError(unknown("option of federation()", option, [*own, *of_source, *of_cut]))
    given = {name: value for name, value in options.items() if value is not None}
    source = Source(**{name: value for name, value in given.items() if name in of_source})
    return source, Cut(**{name: value for name, value in given.items() if name in of_cut})


def with_clients(dataset: Dataset, cut: Cut, domain_of: Mapping[str, str]) -> Federation:
    """The data set's domains as clients, each with a split of its own; `unseen` may name them or their domains."""
    held_out = names(cut.unseen)
    for name in held_out:
        if name not in (*domain_of, *domain_of.values()):
            raise DataError(unknown("client or domain", name, {*domain_of, *domain_of.values()}))
    unseen = [name for name, domain in domain_of.items() if name in held_out or domain in held_out]
    made = replace(cut, unseen=unseen).federation(dataset)
    seen, tested = (
        tuple(replace(client, domain=domain_of[client.name]) for client in group)
        for group in (made.clients, made.unseen)
    )
    return replace(made, clients=seen, unseen=tested)


def splits_of(
    parts: Mapping[str, IntArray],
    labels: IntArray,
    each: Mapping[str, npt.NDArray[Any]],
    said: Mapping[str, Any],
    seed: int,
) -> dict[str, Split]:
    """What is said of each sample for validation and testing, or else shares."""
    validation, test = (checked(0.0 if use in each else said[use], Decay, f"'{use}'") for use in USES)
    refuse_idle_seed(seed, drawn=bool(validation or test))
    held, tested = (each.get(use, np.zeros(len(labels), bool)) for use in USES)
    splits = {}
    for name, own in parts.items():
        rest, *named = (np.flatnonzero(mask[own]) for mask in (~held & ~tested, held, tested))
        groups = each["group"][own] if "group" in each else None
        cuts = shares_of(name, labels[own], (rest, named[0], named[1]), groups, validation, test, seed)
        splits[name] = Split(*(indices(own[part]) for part in cuts))
    return splits


def usual_transform(values: Tensor) -> str:
    return "" if values.is_floating_point() else "normalise"


def one_domain(client: str, domains: npt.NDArray[Any]) -> str:
    first, *others = map(str, np.unique(domains))
    if others:
        raise DataError(
            f"The client '{client}' has samples of the domains '{first}' and '{others[0]}': make it two clients."
        )
    return first


# -- what is said of each sample ---------------------------------------------------------------------------------------
def each_of(given: Any, count: int, what: str) -> npt.NDArray[Any]:
    """One entry for each sample, from whatever holds them; what is missing is told all at once."""
    try:
        array = np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    except ValueError:  # lists of several lengths
        array = np.empty(0)
    array = array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array
    if array.shape != (count,):
        raise DataError(
            f"The '{what}' has the shape {array.shape}: give one for each of the {count:,} samples, in a list or array."
        )
    entries = array.tolist() if array.dtype.kind in "Of" else []
    if lost := [number for number, entry in enumerate(entries) if entry is None or entry != entry]:
        raise DataError(f"There is no {what} of {numbered('sample', lost)}: fill it in, or leave such samples out.")
    if array.dtype.kind == "f" and what != "label" and (array % 1 == 0).all():
        array = array.astype(np.int64)
    return array.astype(str) if array.dtype.kind == "O" else array


def as_labels(
    given: Any, count: int, wanted: Sequence[str] | None, known: Sequence[str] | None = None
) -> tuple[IntArray, tuple[str, ...]]:
    """Labels from 0, and the classes' names: those wanted, those that the data came with, or the labels themselves."""
    array = each_of(given, count, "label")
    if array.dtype.kind in "USb":
        each, place = np.unique(array.astype(str), return_inverse=True)
        found = each.tolist() if wanted is None else list(map(str, wanted))
        for name in each.tolist():
            if name not in found:
                raise DataError(unknown("class", name, found))
        return np.array([found.index(name) for name in each.tolist()], np.int64)[place], tuple(found)
    if array.dtype.kind not in "iu" or array.min() < 0:
        raise DataError(f"The labels are {array.dtype} from {array.min()}: give whole numbers from 0, or names.")
    highest = int(array.max())
    if wanted is None and known is not None and highest < len(known):
        wanted = known
    classes = tuple(map(str, range(highest + 1) if wanted is None else wanted))
    if highest >= len(classes):
        raise DataError(f"There is the label {highest}, and {len(classes)} classes are named: labels count from 0.")
    return array.astype(np.int64), classes
