"""From a name to a federation: read, hold out the unseen domains, cut the others into clients."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedkeel import seeds, spec
from fedkeel.data import partition as partitions
from fedkeel.data.federation import Client, Federation, each_once, no_indices
from fedkeel.data.partition import Partition, apportion
from fedkeel.data.source import DATASETS, IntArray, Source, Split, indices, names, whole
from fedkeel.data.transforms import parse_transforms
from fedkeel.errors import DataError, unknown

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
    source = DATASETS.build(name, **options)
    held_out = names(unseen)
    for domain in held_out:
        if domain not in source.domains:
            raise DataError(unknown("domain", domain, source.domains))
    seen = {domain: split for domain, split in source.domains.items() if domain not in held_out}
    if not seen:
        raise DataError(f"Every domain of '{name}' is unseen: leave at least one to train on.")
    # A count for a domain that is held out is no mistake: the same partition serves every domain left out in turn.
    cutter.check(list(source.domains))
    clients: list[Client] = []
    for domain, split in seen.items():
        clients.extend(cut_domain(source, domain, split, cutter, seed))
    if subsample is not None:
        clients = [subsampled(client, source, subsample, seed) for client in clients]
    federation = Federation(
        name=source.name,
        images=source.images,
        labels=source.labels,
        classes=source.classes,
        clients=tuple(clients),
        train_transform=training or source.train_transform,
        test_transform=testing or source.test_transform,
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


def cut_domain(source: Source, domain: str, split: Split, cutter: Partition, seed: int) -> list[Client]:
    """The clients of one domain. They share its validation and test tensors, so that these are evaluated once."""
    order = split.train.sort().values
    labels: IntArray = source.labels[order].numpy()
    parts = cutter.cut(domain, labels, seeds.numpy_generator(seed, "partition", domain))
    digits = len(str(len(parts) - 1))
    clients = []
    for number, positions in enumerate(parts):
        name = domain if len(parts) == 1 else f"{domain}-{number:0{digits}d}"
        if len(positions) == 0:
            raise DataError(
                f"The client '{name}' gets none of the {len(labels)} training images of '{domain}': "
                "ask for fewer clients or a more even partition."
            )
        clients.append(Client(name, domain, order[torch.from_numpy(positions)], split.validation, split.test))
    return clients


def unseen_client(domain: str, split: Split, which: str) -> Client:
    return Client(domain, domain, no_indices(), no_indices(), split.all() if which == "all" else split.test)


def subsampled(client: Client, source: Source, samples: int, seed: int) -> Client:
    """The client with `samples` of its training images, its classes in the same proportions as far as they go."""
    if client.samples < samples:
        raise DataError(
            f"The client '{client.name}' has {client.samples} training images, fewer than subsample={samples}: "
            "lower subsample or ask for fewer clients."
        )
    generator = seeds.numpy_generator(seed, "subsample", client.name)
    labels: IntArray = source.labels[client.train].numpy()
    present, sizes = np.unique(labels, return_counts=True)
    counts = apportion(sizes.astype(np.int64), samples)
    chosen = [
        generator.permutation(np.flatnonzero(labels == label))[:count]
        for label, count in zip(present, counts, strict=True)
    ]
    kept = client.train[indices(np.sort(np.concatenate(chosen)))]
    return Client(client.name, client.domain, kept, client.validation, client.test)


def warn_of_untrained_classes(federation: Federation) -> None:
    def labels(parts: list[torch.Tensor]) -> set[int]:
        return set(each_once([federation.labels[part] for part in parts]).tolist())

    trained = labels([client.train for client in federation.clients])
    # Clients of one domain share the tensor: look at each once.
    tested = labels(list({id(client.test): client.test for client in federation}.values()))
    for label in sorted(tested - trained):
        log.warning(
            "The class '%s' is in a test set of '%s', but no client trains on it.",
            federation.classes[label],
            federation.name,
        )
