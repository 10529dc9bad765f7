"""Who gets which images: shares of each class, and the subsets that the papers publish.

A rule looks at the labels only, before any image is decoded, and gives positions for training, validation and testing
for each domain. All randomness comes from `split_seed`; FedBN's own merged split of the digits is the exception.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedkeel import seeds
from fedkeel.data.listing import Domain, Parts
from fedkeel.data.partition import apportion
from fedkeel.data.source import IntArray, fractions, stratified_split
from fedkeel.errors import DataError, nearest

log = logging.getLogger("fedkeel")

Domains = Mapping[str, Domain]
NOTHING = np.empty(0, np.int64)


def by_shares(
    domains: Domains, validation: float, test: float, seed: int, *, official: bool = True
) -> dict[str, Parts]:
    """The data set's own split where it has one (and `official` is true), else shares of each class of a domain."""
    fractions(validation, test)
    return {name: shares_of(name, domain, validation, test, seed, official) for name, domain in domains.items()}


def shares_of(name: str, domain: Domain, validation: float, test: float, seed: int, official: bool) -> Parts:
    labels = domain.labels
    if official and domain.official is not None:
        training, held, tested = domain.official
        if len(held) == 0 and validation:
            cuts = stratified_split(labels[training], validation=validation, test=0, seed=seed, purpose=name)
            training, held = training[cuts[0]], training[cuts[1]]
        return training, held, tested
    if domain.groups is None:
        return stratified_split(labels, validation=validation, test=test, seed=seed, purpose=name)
    _, first, group = np.unique(domain.groups, return_index=True, return_inverse=True)
    cuts = stratified_split(labels[first], validation=validation, test=test, seed=seed, purpose=name)
    training, held, tested = (np.flatnonzero(np.isin(group, cut)) for cut in cuts)
    return training, held, tested


def equal_shares(domains: Domains, train: float, validation: float, test: float, seed: int) -> dict[str, Parts]:
    """Equally many training and validation images in every domain: shares of the smallest domain's training pool.

    FedBN takes them from the start and the end of its shuffled training lists. GReg does the same with other shares
    (its Table 6 follows from them). Where the data set has no official test set, `test` of a domain are split off.
    """
    pools, tests = {}, {}
    for name, domain in domains.items():
        if domain.official is not None:
            training, held, tests[name] = domain.official
            pools[name] = np.concatenate([training, held])
        else:
            pools[name], tests[name] = shuffled_split(name, domain.labels, test, seed)
    smallest = min(len(pool) for pool in pools.values())
    # 0.29 * 100 is 28.999... in floats, and must be 29.
    trained, held_out = (math.floor(smallest * share + 1e-9) for share in (train, validation))
    return {
        name: (pool[:trained], pool[len(pool) - held_out :] if held_out else NOTHING, tests[name])
        for name, pool in pools.items()
    }


def shuffled_split(name: str, labels: IntArray, test: float, seed: int) -> tuple[IntArray, IntArray]:
    """ceil(test * n) images to test on, each class in proportion, and the others in a random order."""
    generator = seeds.numpy_generator(seed, "split", name)
    tested = in_proportion(labels, math.ceil(len(labels) * test - 1e-9), generator)
    return generator.permutation(np.setdiff1d(np.arange(len(labels)), tested)), tested


def in_proportion(labels: IntArray, total: int, generator: np.random.Generator) -> IntArray:
    """`total` positions, drawn so that each class keeps its share, sorted."""
    present, sizes = np.unique(labels, return_counts=True)
    counts = apportion(sizes.astype(np.int64), total)
    drawn = [
        generator.permutation(np.flatnonzero(labels == label))[:count]
        for label, count in zip(present, counts, strict=True)
    ]
    return np.sort(np.concatenate([NOTHING, *drawn]))


def merged(domains: Domains, share: float) -> dict[str, Parts]:
    """FedBN's split of the digits: training and test set merged, cut 80 / 20 by class, and of the training images the
    first `share` times as many as the smallest domain has (0.1 gives FedBN's 743, 1 gives FedWon's 7,438).

    The cut is scikit-learn's with `random_state=0`, as in FedBN, so that the same files give the same images.
    """
    from sklearn.model_selection import StratifiedShuffleSplit

    cutter = StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=0)
    cuts = {}
    for name, domain in domains.items():
        labels = domain.labels
        try:
            cuts[name] = next(cutter.split(np.zeros(len(labels)), labels))
        except ValueError as error:
            raise DataError(f"The domain '{name}' cannot be cut 80 / 20 by class ({error}): give all of it.") from error
    taken = int(share * min(len(train) for train, _ in cuts.values()))
    return {name: (train[:taken], NOTHING, test) for name, (train, test) in cuts.items()}


def same_per_class(domains: Domains, per_class: int, test: float, seed: int) -> dict[str, Parts]:
    """`per_class` images of each class of a domain, or all where there are fewer, and of these the share `test`."""
    cuts = {}
    for name, domain in domains.items():
        generator = seeds.numpy_generator(seed, "per class", name)
        labels = domain.labels
        chosen = [generator.permutation(np.flatnonzero(labels == label))[:per_class] for label in np.unique(labels)]
        members = np.sort(np.concatenate([NOTHING, *chosen]))
        parts = stratified_split(labels[members], validation=0, test=test, seed=seed, purpose=name)
        training, held, tested = (members[part] for part in parts)
        cuts[name] = (training, held, tested)
    return cuts


def check_subset(name: str, subset: str | None, choices: tuple[str, ...]) -> None:
    if subset is not None and subset not in choices:
        raise DataError(f"{name} has no subset {subset!r}: {nearest(str(subset), choices)}")


def without_lists(name: str, domains: Domains) -> None:
    """Say that a subset is drawn where the paper's own lists are not there."""
    if any(domain.official is None for domain in domains.values()):
        log.warning(
            "FedBN's lists are not in the folder 'splits' of '%s': subsets of the published sizes are drawn by "
            "split_seed, of other images than FedBN's.",
            name,
        )


def unsplit(domains: Domains) -> dict[str, Domain]:
    """The domains without the split that they came with."""
    return {name: replace(domain, official=None) for name, domain in domains.items()}
