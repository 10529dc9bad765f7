"""Which images are for training, validation and testing: shares of each class, and the subsets that the papers publish.

A rule looks at the labels only, before any image is decoded, and gives positions for each domain. All randomness comes
from `split_seed`; FedBN's own merged split of the digits is the exception.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedkeel import seeds
from fedkeel.data.dataset import Domain, Parts
from fedkeel.data.partition import in_proportion, shuffled_classes
from fedkeel.data.population import IntArray
from fedkeel.errors import DataError

Domains = Mapping[str, Domain]
NOTHING = np.empty(0, np.int64)


def stratified_split(labels: IntArray, validation: float, test: float, seed: int, purpose: str) -> Parts:
    """Positions with each class cut in the same proportions; one that has any image keeps at least one to train on."""
    parts: tuple[list[IntArray], ...] = ([], [], [])
    for members in shuffled_classes(labels, seeds.numpy_generator(seed, "split", purpose)):
        tests = min(int(len(members) * test + 0.5), len(members) - 1)
        validations = min(int(len(members) * validation + 0.5), len(members) - 1 - tests)
        cuts = np.split(members, [tests, tests + validations])
        for part, cut in zip((parts[2], parts[1], parts[0]), cuts, strict=True):
            part.append(cut)
    train, held, tested = (np.sort(np.concatenate([NOTHING, *part])) for part in parts)
    return train, held, tested


def check_shares(validation: float, test: float) -> None:
    if validation + test >= 1:
        raise DataError(
            f"validation={validation} and test={test} leave nothing to train on: their sum must be below 1."
        )


def by_shares(
    domains: Domains, seed: int, *, validation: float, test: float, official: bool = True
) -> dict[str, Parts]:
    """The data set's own split where it has one (and `official` is true), else shares of each class of a domain."""
    check_shares(validation, test)
    return {
        name: shares_of(name, domain if official else replace(domain, official=None), validation, test, seed)
        for name, domain in domains.items()
    }


def shares_of(name: str, domain: Domain, validation: float, test: float, seed: int) -> Parts:
    labels = domain.labels
    if domain.official is not None:
        training, held, tested = domain.official
        if len(held) == 0 and validation:
            kept, drawn, _ = stratified_split(labels[training], validation, 0, seed, name)
            training, held = training[kept], training[drawn]
        return training, held, tested
    if domain.groups is None:
        return stratified_split(labels, validation, test, seed, name)
    _, first, group = np.unique(domain.groups, return_index=True, return_inverse=True)
    cuts = stratified_split(labels[first], validation, test, seed, name)
    training, held, tested = (np.flatnonzero(np.isin(group, cut)) for cut in cuts)
    return training, held, tested


def equal_shares(
    domains: Domains, seed: int, *, train: float, validation: float, test: float, official: bool = True
) -> dict[str, Parts]:
    """Equally many training and validation images in every domain: shares of the smallest domain's training pool.

    FedBN takes them from the start and the end of its shuffled training lists. GReg does the same with other shares
    (its Table 6 follows from them). Where the data set has no official test set, `test` of a domain are split off.
    """
    pools, tests = {}, {}
    for name, domain in domains.items():
        if official and domain.official is not None:
            training, held, tests[name] = domain.official
            pools[name] = np.concatenate([training, held])
        else:
            pools[name], tests[name] = shuffled_split(name, domain.labels, test, seed)
    smallest = min(len(pool) for pool in pools.values())
    # 0.29 * 100 is 28.999... in floats, and must be 29.
    trained, held_out = (math.floor(smallest * share + 1e-9) for share in (train, validation))
    return {name: (pool[:trained], pool[len(pool) - held_out :], tests[name]) for name, pool in pools.items()}


def shuffled_split(name: str, labels: IntArray, test: float, seed: int) -> tuple[IntArray, IntArray]:
    """ceil(test * n) images to test on, each class in proportion, and the others in a random order."""
    generator = seeds.numpy_generator(seed, "split", name)
    tested = in_proportion(labels, math.ceil(len(labels) * test - 1e-9), generator)
    return generator.permutation(np.setdiff1d(np.arange(len(labels)), tested)), tested


def merged(domains: Domains, _: int, *, share: float) -> dict[str, Parts]:
    """FedBN's split of the digits: training and test set merged, cut 80 / 20 by class, and of the training images the
    first `share` times as many as the smallest domain has (0.1 gives FedBN's 743, 1 gives FedWon's 7,438).

    The cut is scikit-learn's with `random_state=0`, as in FedBN, so that the same files give the same images.
    """
    from sklearn.model_selection import StratifiedShuffleSplit  # takes a second, which only this split needs

    cutter = StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=0)
    cuts = {}
    for name, domain in domains.items():
        try:
            cuts[name] = next(cutter.split(np.zeros(len(domain.labels)), domain.labels))
        except ValueError as error:
            raise DataError(f"The domain '{name}' cannot be cut 80 / 20 by class ({error}): give all of it.") from error
    taken = int(share * min(len(train) for train, _ in cuts.values()))
    return {name: (train[:taken], NOTHING, test) for name, (train, test) in cuts.items()}


def same_per_class(domains: Domains, seed: int, *, per_class: int, test: float) -> dict[str, Parts]:
    """`per_class` images of each class of a domain, or all where there are fewer, and of these the share `test`."""
    cuts = {}
    for name, domain in domains.items():
        classes = shuffled_classes(domain.labels, seeds.numpy_generator(seed, "per class", name))
        members = np.sort(np.concatenate([NOTHING, *(own[:per_class] for own in classes)]))
        train, held, tested = stratified_split(domain.labels[members], 0, test, seed, name)
        cuts[name] = (members[train], members[held], members[tested])
    return cuts
