"""From a name to a federation: read, hold out the unseen domains, cut the others into clients."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedkeel import seeds, spec
from fedkeel.data import partition as partitions
from fedkeel.data.federation import Client, Federation, Transform, each_once, no_indices
from fedkeel.data.partition import Partition, Pool, apportion
from fedkeel.data.population import Group, Population, Slices
from fedkeel.data.source import DATASETS, IntArray, Source, Split, names, whole
from fedkeel.data.transforms import parse_transforms
from fedkeel.errors import DataError, unknown
from fedkeel.options import as_path

log = logging.getLogger("fedkeel")


def load(
    name: str,
    *,
    partition: str | Partition = "domains",
    unseen: str | Sequence[str] = (),
    unseen_split: str = "all",
    subsample: int | None = None,
    seed: int = 0,
    train_transform: str | None = None,
    test_transform: str | None = None,
    **options: Any,
) -> Federation:
    """Read the data set `name` and cut it into clients.

    Args:
        name: of a registered data set, e.g. "digits-shift" or "folder".
        partition: how each domain's training images become clients, e.g. "dirichlet(alpha=0.3, clients=10)".
        unseen: a domain, or several, that are held out: evaluated, never trained on.
        unseen_split: "all" tests on every image of an unseen domain, "test" on its test images only.
        subsample: the number of training images that each client keeps, drawn class by class.
        seed: of the partition and the subsample; the split into train, validation and test does not depend on it.
        train_transform, test_transform: in place of the data set's own, e.g. "crop(padding=4)+flip+normalise".
        options: of the reader, e.g. `root` and `size`.
    """
    # All that can be refused without reading a single image is refused first.
    cutter = partitions.build(partition)
    training = None if train_transform is None else parse_transforms(train_transform)
    testing = None if test_transform is None else parse_transforms(test_transform)
    if unseen_split not in ("all", "test"):
        raise DataError(f"unseen_split is {unseen_split!r}: choose 'all' or 'test'.")
    if subsample is not None:
        whole("subsample", subsample, 1)
    if options.get("root") is not None:
        as_path(options["root"], "root")
    source = DATASETS.build(name, **options)
    warn_of_empty_classes(source)
    return cut(source, cutter, unseen, unseen_split, subsample, seed, training, testing)


def cut(
    source: Source,
    cutter: Partition,
    unseen: str | Sequence[str] = (),
    unseen_split: str = "all",
    subsample: int | None = None,
    seed: int = 0,
    train_transform: Transform | None = None,
    test_transform: Transform | None = None,
) -> Federation:
    """Hold out the unseen domains of what was read and cut the others into clients."""
    held_out = names(unseen)
    for domain in held_out:
        if domain not in source.domains:
            raise DataError(unknown("domain", domain, source.domains))
    seen = {domain: split for domain, split in source.domains.items() if domain not in held_out}
    if not seen:
        raise DataError(f"Every domain of '{source.name}' is unseen: leave at least one to train on.")
    # A count for a domain that is held out is no mistake: the same partition serves every domain left out in turn.
    cutter.check(list(source.domains))
    groups = [cut_domain(source, domain, split, cutter, seed, subsample) for domain, split in seen.items()]
    federation = Federation(
        name=source.name,
        images=source.images,
        labels=source.labels,
        classes=source.classes,
        clients=Population(groups),
        train_transform=train_transform or source.train_transform,
        test_transform=test_transform or source.test_transform,
        unseen=tuple(unseen_client(domain, source.domains[domain], unseen_split) for domain in held_out),
    )
    warn_of_untrained_classes(federation)
    return federation


def load_spec(
    text: str, *, partition: str | None = None, root: str | os.PathLike[str] | None = None, seed: int = 0
) -> Federation:
    """Load from text as people type it: `folder(root=./images, size=64, unseen=sketch)`.

    The options in the brackets are those of `load`; what is given both there and as an argument is refused.
    """
    parsed = spec.parse(text)
    options: dict[str, Any] = {"seed": seed, **parsed.options}
    for option, value in (("partition", partition), ("root", root)):
        if value is None:
            continue
        if option in parsed.options:
            raise DataError(f"The {option} is given twice, in '{text}' and as '{value}': keep one.")
        options[option] = value
    return load(parsed.name, **options)


def cut_domain(source: Source, domain: str, split: Split, cutter: Partition, seed: int, subsample: int | None) -> Group:
    """The clients of one domain. They share its validation and test tensors, so that these are evaluated once."""
    train = split.train.sort().values
    labels: IntArray = source.labels[train].numpy()
    users = None if source.users is None else source.users[train.numpy()]
    shares = cutter.shares(Pool(domain, labels, users, seed))
    group = Group(domain, shares, train, split.validation, split.test)
    empty = np.flatnonzero(shares.sizes == 0)
    if len(empty):
        raise DataError(
            f"The client '{group.name(int(empty[0]))}' gets none of the {len(labels)} training images of '{domain}': "
            "ask for fewer clients or a more even partition."
        )
    return group if subsample is None else subsampled(group, labels, subsample, seed)


def unseen_client(domain: str, split: Split, which: str) -> Client:
    return Client(domain, domain, no_indices(), no_indices(), split.all() if which == "all" else split.test)


def subsampled(group: Group, labels: IntArray, samples: int, seed: int) -> Group:
    """The clients with `samples` of their training images, their classes in the same proportions as far as they go."""
    shares, sizes = group.shares, group.shares.sizes
    if not isinstance(shares, Slices):
        raise DataError(
            f"Every client of '{group.domain}' draws {sizes[0]} samples of its own, so subsample={samples} has nothing "
            "to do: leave one of them out."
        )
    few = np.flatnonzero(sizes < samples)
    if len(few):
        raise DataError(
            f"The client '{group.name(int(few[0]))}' has {sizes[few[0]]} training images, fewer than "
            f"subsample={samples}: lower subsample or ask for fewer clients."
        )

    def kept(number: int) -> IntArray:
        positions = shares.positions(number)
        own = labels[positions]
        generator = seeds.numpy_generator(seed, "subsample", group.name(number))
        present, counts = np.unique(own, return_counts=True)
        chosen = [
            generator.permutation(np.flatnonzero(own == label))[:count]
            for label, count in zip(present, apportion(counts.astype(np.int64), samples), strict=True)
        ]
        left: IntArray = positions[np.sort(np.concatenate(chosen))]
        return left

    return replace(group, shares=shares.fewer([kept(number) for number in range(len(group))]))


def warn_of_empty_classes(source: Source) -> None:
    present = set(torch.unique(source.labels).tolist())
    missing = [f"'{name}'" for label, name in enumerate(source.classes) if label not in present]
    if missing:
        shown = ", ".join(missing[:3]) + (" and others" if len(missing) > 3 else "")
        counts = f"{len(missing)} of the {len(source.classes)} classes"
        log.warning("'%s' has no image of %s: %s.", source.name, counts, shown)


def warn_of_untrained_classes(federation: Federation) -> None:
    def labels(parts: list[torch.Tensor]) -> set[int]:
        return set(each_once([federation.labels[part] for part in parts]).tolist())

    trained = labels([federation.training_images()])
    tested = labels([client.test for client in federation.one_of_each()])
    for label in sorted(tested - trained):
        log.warning(
            "The class '%s' is in a test set of '%s', but no client trains on it.",
            federation.classes[label],
            federation.name,
        )
