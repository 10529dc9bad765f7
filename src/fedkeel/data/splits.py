"""Which images are for training, validation and testing: shares of each class, and the subsets that the papers publish.

A rule looks at the labels only, before any image is decoded, and gives positions for each domain. All randomness comes
from `split_seed`; FedBN's own merged split of the digits is the exception.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedkeel import seeds
from fedkeel.data.dataset import Domain, Parts
from fedkeel.data.partition import in_proportion, shuffled_classes
from fedkeel.data.population import USES, IntArray
from fedkeel.errors import DataError

log = logging.getLogger("fedkeel")

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


def refuse_idle_seed(seed: int, *, drawn: bool) -> None:
    if seed and not drawn:
        raise DataError(f"split_seed={seed} does nothing where no split is drawn at random: leave it out.")


def by_shares(
    domains: Domains, seed: int, *, validation: float, test: float, official: bool = True, of_all: bool = False
) -> dict[str, Parts]:
    """The data set's own split where it has one (and `official` is true), else shares of each class of a domain.

    `of_all`: the seed was given for several sites, and may have no effect here.
    """
    own = [domain.official if official else None for domain in domains.values()]
    drawn = any(validation and not len(parts[1]) if parts else validation or test for parts in own)
    refuse_idle_seed(seed, drawn=drawn or of_all)
    cuts = {}
    for name, domain in domains.items():
        given = domain.official if official else None
        # A split that comes without test images, such as PACS's lists, is for domains that are left out.
        tested = test if given is None else 0.0
        cuts[name] = shares_of(name, domain.labels, given, domain.groups, validation, tested, seed)
    return cuts


def shares_of(
    name: str,
    labels: IntArray,
    given: Parts | None,
    groups: npt.NDArray[Any] | None,
    validation: float,
    test: float,
    seed: int,
) -> Parts:
    """A split completed: what is `given` for validation or testing, and else shares of the rest, class by class or with
    `groups` in one piece."""
    if validation + test >= 1:
        raise DataError(
            f"validation={validation} and test={test} leave nothing to train on: their sum must be below 1."
        )
    training, held, tested = given or (np.arange(len(labels)), NOTHING, NOTHING)
    if groups is not None:
        refuse_divided_groups(name, [groups[part] for part in (training, held, tested)])
    shares = (0.0 if len(held) else validation, 0.0 if len(tested) else test)
    if any(shares):
        rest = training
        if groups is None:
            kept, more_held, more_tested = stratified_split(labels[rest], *shares, seed, name)
        else:
            kept, more_held, more_tested = grouped_split(labels[rest], groups[rest], *shares, seed, name)
        training = rest[kept]
        held, tested = np.concatenate([held, rest[more_held]]), np.concatenate([tested, rest[more_tested]])
    return training, held, tested


def grouped_split(
    labels: IntArray, groups: npt.NDArray[Any], validation: float, test: float, seed: int, purpose: str
) -> Parts:
    """Positions with whole groups in one part, and each class in the same proportions as far as groups allow.

    From the largest group on, those of equal size in a random order, each goes where its classes are missing most,
    counted in shares of the class.
    """
    names, group = np.unique(groups, return_inverse=True)
    classes, label = np.unique(labels, return_inverse=True)
    counts = np.zeros((len(names), len(classes)))
    np.add.at(counts, (group, label), 1)
    shares = np.array([1 - validation - test, validation, test])
    counts /= counts.sum(0)
    missing = np.repeat(shares[:, None], counts.shape[1], axis=1)
    order = seeds.numpy_generator(seed, "split", purpose).permutation(len(names))
    order = order[np.argsort(-np.bincount(group)[order], kind="stable")]
    part = np.zeros(len(names), np.int64)
    for one in order:
        # Rounded, since sums of floats differ from machine to machine; of equals the first, training.
        gain = np.where(shares > 0, np.round((missing * counts[one]).sum(1), 9), -np.inf)
        part[one] = int(gain.argmax())
        missing[part[one]] -= counts[one]
    if len(order) and not (part == 0).any():
        part[order[-1]] = 0
    for use, share, number in (("validation", validation, 1), ("test", test, 2)):
        if share and not (part == number).any():
            log.warning("The %d groups of '%s' are too few for a %s set: it has none.", len(names), purpose, use)
    train, held, tested = (np.flatnonzero(part[group] == number) for number in range(3))
    return train, held, tested


def refuse_divided_groups(name: str, parts: Sequence[npt.NDArray[Any]]) -> None:
    owner: dict[Any, str] = {}
    for use, groups in zip(USES, parts, strict=True):
        for group in np.unique(groups).tolist():
            if owner.setdefault(group, use) != use:
                raise DataError(
                    f"The group '{group}' of '{name}' is for {owner[group]} and for {use}: put all of a group into one."
                )


def equal_shares(
    domains: Domains, seed: int, *, train: float, validation: float, test: float, official: bool = True
) -> dict[str, Parts]:
    """Equally many training and validation images in every domain: shares of the smallest domain's training pool.

    FedBN takes them from the start and the end of its shuffled training lists. GReg does the same with other shares
    (its Table 6 follows from them). Where the data set has no official test set, `test` of a domain are split off.
    """
    refuse_idle_seed(seed, drawn=not official or any(domain.official is None for domain in domains.values()))
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


def merged(domains: Domains, seed: int, *, share: float) -> dict[str, Parts]:
    """FedBN's split of the digits: training and test set merged, cut 80 / 20 by class, and of the training images the
    first `share` times as many as the smallest domain has (0.1 gives FedBN's 743, 1 gives FedWon's 7,438).

    The cut is scikit-learn's with `random_state=0`, as in FedBN, so that the same files give the same images.
    """
    from sklearn.model_selection import StratifiedShuffleSplit  # takes a second, which only this split needs

    refuse_idle_seed(seed, drawn=False)
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
