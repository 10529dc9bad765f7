"""A federation from data that are in Python already: arrays, tables, torch data sets, Hugging Face data sets.

    fedkeel.data.federation(images, labels, clients=hospital_of_each_image, groups=patient_of_each_image)
    fedkeel.data.federation(table, label="diagnosis", clients="hospital", test=0.3, unseen="clinic 4")
    fedkeel.data.federation(torchvision_set, partition="dirichlet(alpha=0.3, clients=10)")

What the samples are is `fedkeel.data.sources`' affair; here they get labels, clients and a split. An .npz pack comes
the same way.
"""

from __future__ import annotations

import logging
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
from fedkeel.data.sources import Samples, Source
from fedkeel.data.splits import check_shares, refuse_divided_groups, split
from fedkeel.errors import DataError, numbered, unknown
from fedkeel.options import Decay, checked, described
from fedkeel.spec import names

log = logging.getLogger("fedkeel")
MOST_GAPS = 1000  # classes without a sample, beyond which labels are no numbers of classes


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
        clients: whose each sample is (a name for each, or a column's name), or their samples' numbers, {name: numbers}.
            Without, `partition` cuts the data, domain by domain.
        domains: what each sample's domain is called (a column's name, too). By default a client is a domain of its own.
        groups: the patient of each sample, or a column's name: no group is in two splits of a client.
        test, validation: the share of each client's samples, by class; or which: numbers, truth values, a column.
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
        raise DataError(
            "Whose the samples are is not said: give clients=..., or have them cut, "
            "partition='dirichlet(alpha=0.3, clients=10)'."
        )
    said = {"clients": clients, "domains": domains, "groups": groups, "test": test, "validation": validation}
    samples = source.read(data, labels, [given for given in said.values() if isinstance(given, str)])
    said = {what: samples.column(given) if isinstance(given, str) else given for what, given in said.items()}
    count = len(samples.values)
    y, classes = as_labels(samples.labels, count, source.classes, samples.classes)
    splits = Splits(y, said["test"], said["validation"], said["groups"], source.split_seed)
    if said["clients"] is not None:
        parts = members_of(said["clients"], count)
        return with_clients(
            as_dataset(source.name, samples, y, classes, parts, splits), cut, domains_of(parts, said["domains"], count)
        )
    parts = {source.name: np.arange(count)} if domains is None else by_name(said["domains"], count, "domain")
    return cut.federation(as_dataset(source.name, samples, y, classes, parts, splits))


def read_options(options: Mapping[str, Any]) -> tuple[Source, Cut]:
    of_source, of_cut = ([field.name for field in fields(kind)] for kind in (Source, Cut))
    for option in options:
        if option not in (*of_source, *of_cut):
            own = ("clients", "domains", "groups", "test", "validation")
            raise DataError(unknown("option of federation()", option, [*own, *of_source, *of_cut]))
    given = {name: value for name, value in options.items() if value is not None}
    source = Source(**{name: value for name, value in options.items() if name in of_source})
    return source, Cut(**{name: value for name, value in given.items() if name in of_cut})


def as_dataset(
    name: str,
    samples: Samples,
    labels: IntArray,
    classes: Sequence[str],
    parts: Mapping[str, IntArray],
    splits: Splits,
) -> Dataset:
    """The samples of each domain, split into training, validation and test."""
    usual = "" if samples.values.is_floating_point() else "normalise"
    return Dataset(
        name=name,
        images=samples.values,
        labels=torch.from_numpy(labels),
        classes=tuple(classes),
        domains={domain: splits.of(domain, positions) for domain, positions in parts.items()},
        train_transform=usual,
        test_transform=usual,
        columns=samples.columns,
    )


def with_clients(dataset: Dataset, cut: Cut, domain_of: Mapping[str, str]) -> Federation:
    """The data set's domains as clients, each with a split of its own; `unseen` may name them or their domains."""
    held_out = names(cut.unseen)
    for name in held_out:
        if name not in (*domain_of, *domain_of.values()):
            raise DataError(unknown("client or domain", name, {*domain_of, *domain_of.values()}))
    unseen = [name for name, domain in domain_of.items() if name in held_out or domain in held_out]
    for name in domain_of:
        if name not in unseen and not len(dataset.domains[name].train):
            raise DataError(f"The client '{name}' has no samples to train on: leave it out or give it some.")
    made = replace(cut, unseen=unseen).federation(dataset)
    seen = tuple(replace(client, domain=domain_of[client.name]) for client in made.clients)
    tested = tuple(replace(client, domain=domain_of[client.name]) for client in made.unseen)
    return replace(made, clients=seen, unseen=tested)


def domains_of(members: Mapping[str, IntArray], domains: Any, count: int) -> dict[str, str]:
    """The domain of each client, which is that of all of its samples."""
    if domains is None:
        return {name: name for name in members}
    of = each_name(domains, count, "domain")
    found = {name: [str(domain) for domain in np.unique(of[positions])] for name, positions in members.items()}
    for name, own in found.items():
        if len(own) > 1:
            raise DataError(
                f"The client '{name}' has samples of the domains '{own[0]}' and '{own[1]}': a client has one domain; "
                "make it two clients."
            )
    return {name: own[0] for name, own in found.items()}


# -- labels ------------------------------------------------------------------------------------------------------------
def as_labels(
    given: Any, count: int, wanted: Sequence[str] | None, known: Sequence[str] | None
) -> tuple[IntArray, tuple[str, ...]]:
    """Labels from 0, and the classes' names: those wanted, those that the data came with, or the labels themselves."""
    array = plain(given, "'labels'")
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(
            f"The labels have the shape {array.shape}: give one class for each sample (of one-hot rows, argmax(1)); "
            "several classes for a sample are not supported."
        )
    if len(array) != count:
        raise DataError(f"There are {len(array):,} labels for {count:,} samples: give one for each.")
    if array.dtype.kind in "OUSb":
        refuse_missing(array, "label")
        array = array.astype(str)
        found = np.unique(array).tolist() if wanted is None else list(map(str, wanted))
        for name in np.unique(array).tolist():
            if name not in found:
                raise DataError(unknown("class", name, found))
        place = {name: number for number, name in enumerate(found)}
        return np.array([place[name] for name in array.tolist()], np.int64), tuple(found)
    if array.dtype.kind not in "iu":
        raise DataError(f"The labels are {array.dtype}: give whole numbers from 0, labels.astype(int), or names.")
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0:
        raise DataError(f"The label of sample {int(array.argmin())} is {lowest}: give whole numbers from 0, or names.")
    if wanted is None and known is not None and highest < len(known):
        wanted = known
    if wanted is not None and highest >= len(wanted):
        raise DataError(
            f"The label of sample {int(array.argmax())} is {highest}, and {len(wanted)} classes are named: labels go "
            f"from 0 to {len(wanted) - 1}."
        )
    if highest > MOST_GAPS + len(np.unique(array)):
        raise DataError(
            f"The labels go up to {highest:,}, and only {len(np.unique(array)):,} are there: number the classes from "
            "0, or give them as names, labels.astype(str)."
        )
    return array.astype(np.int64), tuple(map(str, range(highest + 1) if wanted is None else wanted))


def plain(given: Any, what: str) -> npt.NDArray[Any]:
    """One entry for each sample, from whatever holds them."""
    if isinstance(given, Tensor):
        given = given.detach().cpu()
    if isinstance(given, str | Mapping) or not hasattr(given, "__len__"):
        raise DataError(f"{what} is {described(given)}: give one for each sample, as a list or an array.")
    try:
        return np.asarray(given)
    except ValueError as error:  # lists of several lengths
        raise DataError(f"{what} holds lists of different lengths: give one entry for each sample.") from error


def refuse_missing(array: npt.NDArray[Any], what: str) -> None:
    """None and not-a-number stand for what is not there."""
    entries = array.tolist() if array.dtype.kind in "Of" else []
    if lost := [number for number, entry in enumerate(entries) if entry is None or entry != entry]:
        raise DataError(f"There is no {what} of {numbered('sample', lost)}: fill it in, or leave such samples out.")


# -- clients -----------------------------------------------------------------------------------------------------------
def each_name(given: Any, count: int, what: str) -> npt.NDArray[Any]:
    """A name for each sample."""
    array = plain(given, f"'{what}s'")
    if array.shape != (count,):
        raise DataError(f"There are {what}s of shape {array.shape} for {count:,} samples: give one for each.")
    refuse_missing(array, what)
    if array.dtype.kind == "f" and (array % 1 == 0).all():
        array = array.astype(np.int64)
    return array.astype(str) if array.dtype.kind == "O" else array


def by_name(given: Any, count: int, what: str) -> dict[str, IntArray]:
    """The samples of each name, in the names' order."""
    found, place = np.unique(each_name(given, count, what), return_inverse=True)
    parts = np.split(np.argsort(place, kind="stable"), np.cumsum(np.bincount(place))[:-1])
    return {str(name): part for name, part in zip(found.tolist(), parts, strict=True)}


def members_of(clients: Any, count: int) -> dict[str, IntArray]:
    """The samples of each client, checked: no two clients share one."""
    if not isinstance(clients, Mapping):
        return by_name(clients, count, "client")
    given = {str(name): own for name, own in clients.items()}
    if not given:
        raise DataError("There is no client: give at least one.")
    owner = np.full(count, -1)
    members = {}
    for number, (name, own) in enumerate(given.items()):
        positions = members[name] = numbers(own, count, f"The client '{name}'")
        if len(positions) == 0:
            raise DataError(f"The client '{name}' has no samples: leave it out or give it some.")
        taken = positions[owner[positions] >= 0]
        if len(taken):
            other = list(given)[owner[taken[0]]]
            raise DataError(f"Sample {taken[0]} is of both '{other}' and '{name}': give it to one client.")
        owner[positions] = number
    if left := int((owner < 0).sum()):
        log.warning("%d of the %d samples belong to no client: they are not used.", left, count)
    return members


def numbers(given: Any, count: int, whose: str) -> IntArray:
    """Which samples, sorted, each once: from their numbers, or from true or false for each."""
    array = plain(given, whose)
    if array.dtype.kind == "b" and array.shape == (count,):
        return np.flatnonzero(array)
    if array.size == 0:
        return np.empty(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{whose} is {array.dtype} of shape {array.shape}: give the numbers of samples, from 0.")
    if array.min() < 0 or array.max() >= count:
        wrong = int(array[(array < 0) | (array >= count)][0])
        raise DataError(f"{whose} has the sample {wrong}, and there are {count:,}: they are counted from 0.")
    return np.unique(array).astype(np.int64)


class Splits:
    """Which of a domain's samples are for testing and validation: those that were named or, where none of the domain
    is, a share of each class, groups in one piece."""

    def __init__(self, labels: IntArray, test: Any, validation: Any, groups: Any, seed: int) -> None:
        self.labels, self.seed = labels, seed
        self.groups = None if groups is None else each_name(groups, len(labels), "group")
        (self.test, self.tested), (self.validation, self.held) = (
            self._read(given, what) for given, what in ((test, "test"), (validation, "validation"))
        )
        check_shares(self.validation, self.test)
        both = np.flatnonzero(self.tested & self.held)
        if len(both):
            raise DataError(f"Sample {both[0]} is for testing and for validation: keep it in one.")

    def _read(self, given: Any, what: str) -> tuple[float, npt.NDArray[np.bool_]]:
        """A share, and which samples are named."""
        named = np.zeros(len(self.labels), bool)
        if isinstance(given, int | float | np.number) and not isinstance(given, bool):
            return checked(float(given), Decay, f"'{what}'"), named
        named[numbers(given, len(self.labels), f"'{what}'")] = True
        return 0.0, named

    def of(self, name: str, positions: IntArray) -> Split:
        tested, held = positions[self.tested[positions]], positions[self.held[positions]]
        rest = positions[~(self.tested | self.held)[positions]]
        groups = None if self.groups is None else self.groups[rest]
        if self.groups is not None:
            refuse_divided_groups(name, [self.groups[part] for part in (rest, held, tested)])
        shares = (0.0 if len(held) else self.validation, 0.0 if len(tested) else self.test)
        train, more_held, more_tested = split(self.labels[rest], groups, *shares, self.seed, name)
        parts = rest[train], np.concatenate([held, rest[more_held]]), np.concatenate([tested, rest[more_tested]])
        return Split(*(indices(np.sort(part)) for part in parts))
