"""From a name to a federation: read, hold out the unseen domains, cut the others into clients."""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fedkeel import seeds, spec
from fedkeel.data import partition as partitions
from fedkeel.data.dataset import Dataset
from fedkeel.data.federation import Federation
from fedkeel.data.partition import Partition, as_typed, in_proportion
from fedkeel.data.population import Client, ClientGroup, IntArray, Population, Shares, each_once, no_indices
from fedkeel.data.reader import DATASETS
from fedkeel.data.transforms import parse_transforms
from fedkeel.errors import DataError, quoted, unknown
from fedkeel.options import Count, as_path, check_fields

log = logging.getLogger("fedkeel")


@dataclass(frozen=True)
class Cut:
    """How a data set becomes a federation: the options of `load` that go with every data set."""

    partition: str | Partition = "domains"  # of each domain's training images, e.g. "dirichlet(alpha=0.3, clients=10)"
    unseen: str | Sequence[str] = ()  # a domain, or several, that are held out: evaluated, never trained on
    unseen_split: Literal["all", "test"] = "all"  # test on every image of an unseen domain, or on its test images only
    tests: Literal["shared", "own"] = "shared"  # clients of a domain share its test images, or have their own class mix
    subsample: Count | None = None  # training images that each client keeps, drawn class by class
    seed: int = 0  # of the partition and the subsample; the split into train, validation and test does not depend on it
    train_transform: str | None = None  # in place of the data set's own, e.g. "crop(padding=4)+flip+normalise"
    test_transform: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, "{}")
        object.__setattr__(self, "partition", partitions.build(self.partition))
        for text in (self.train_transform, self.test_transform):
            parse_transforms(text or "")

    def federation(self, dataset: Dataset) -> Federation:
        """Hold out the unseen domains of what was read and cut the others into clients."""
        held_out = spec.names(self.unseen)
        for domain in held_out:
            if domain not in dataset.domains:
                raise DataError(unknown("domain", domain, dataset.domains))
        seen = [domain for domain in dataset.domains if domain not in held_out]
        if not seen:
            raise DataError(f"Every domain of '{dataset.name}' is unseen: leave at least one to train on.")
        # A count for a domain that is held out is no mistake: the same partition serves every domain left out in turn.
        for domain in getattr(self.partition, "counts", {}):
            if as_typed(domain) not in map(as_typed, dataset.domains):
                raise DataError(unknown("training domain", domain, dataset.domains))
        clients: Sequence[Client] = Population([self.group(dataset, domain) for domain in seen])
        if self.tests == "own":
            clients = [with_own_mix(client, dataset.labels, self.seed) for client in clients]
        given = {"train_transform": self.train_transform, "test_transform": self.test_transform}
        chosen = {name: getattr(dataset, name) if text is None else text for name, text in given.items()}
        federation = Federation(
            name=dataset.name,
            images=dataset.images,
            labels=dataset.labels,
            classes=dataset.classes,
            clients=clients,
            **{name: parse_transforms(own) if isinstance(own, str) else own for name, own in chosen.items()},
            unseen=tuple(self.unseen_client(dataset, domain) for domain in held_out),
            on_disk=dataset.on_disk,
            bits=dataset.bits,
            paths=dataset.paths,
            columns=dataset.columns,
        )
        refuse_transforms(federation)
        warn_of_gaps(dataset, federation)
        return federation

    def unseen_client(self, dataset: Dataset, domain: str) -> Client:
        split = dataset.domains[domain]
        tested = split.all() if self.unseen_split == "all" else split.test
        return Client(domain, domain, no_indices(), no_indices(), tested)

    def group(self, dataset: Dataset, domain: str) -> ClientGroup:
        """The clients of one domain. They share its validation and test tensors, so that these are evaluated once."""
        split = dataset.domains[domain]
        train = split.train.sort().values
        labels: IntArray = dataset.labels[train].numpy()
        shares = partitions.build(self.partition).shares(domain, labels, self.seed)
        group = ClientGroup(domain, shares, train, split.validation, split.test)
        least = int(shares.sizes.argmin())
        if shares.sizes[least] < (self.subsample or 1):
            raise DataError(
                f"The client '{group.name(least)}' gets {shares.sizes[least]} of the {len(labels)} training samples of "
                f"'{domain}', fewer than {self.subsample or 1}: ask for fewer clients, or a lower subsample."
            )
        return group if self.subsample is None else subsampled(group, labels, self.subsample, self.seed)


def load(name: str, **options: Any) -> Federation:
    """Read the data set `name`, e.g. "digits-shift" or "folder", and cut it into clients.

    The options are those of `Cut` (`partition`, `unseen`, `unseen_split`, `tests`, `subsample`, `seed`,
    `train_transform`, `test_transform`) and those of the reader, e.g. `root` and `size`.

    >>> federation = load("digits-shift", unseen="scan", partition="even(clients=2)")
    >>> len(federation.clients), [client.name for client in federation.unseen]
    (8, ['scan'])
    """
    # All that can be refused without reading a single image is refused first.
    cut = Cut(**{field.name: options.pop(field.name) for field in fields(Cut) if field.name in options})
    if options.get("root") is not None:
        as_path(options["root"], "root")
    return cut.federation(DATASETS.build(name, **options))


def refuse_missing(text: str) -> None:
    """What `load_spec` refuses, as far as it can be told without decoding an image."""
    parsed = spec.parse(text)
    options = dict(parsed.options)
    Cut(**{field.name: options.pop(field.name) for field in fields(Cut) if field.name in options})
    DATASETS.refuse_missing(parsed.name, **options)


def load_spec(
    text: str, *, partition: str | None = None, root: str | os.PathLike[str] | None = None, seed: int = 0
) -> Federation:
    """Load from text as people type it: `folder(root=./images, size=64, unseen=sketch)`.

    The options in the brackets are those of `load`; what is given both there and as an argument is refused.

    >>> load_spec("digits-shift(unseen=scan)", partition="even(clients=2)").unseen[0].name
    'scan'
    """
    parsed = spec.parse(text)
    options: dict[str, Any] = {"seed": seed, **parsed.options}
    for option, value in (("partition", partition), ("root", root)):
        if value is not None and option in parsed.options:
            raise DataError(f"The {option} is given twice, in '{text}' and as '{value}': keep one.")
        options |= {} if value is None else {option: value}
    return load(parsed.name, **options)


def subsampled(group: ClientGroup, labels: IntArray, samples: int, seed: int) -> ClientGroup:
    """The clients with `samples` of their training images, their classes in the same proportions as far as they go."""
    if type(group.shares) is not Shares:
        raise DataError(
            f"Every client of '{group.domain}' draws its own samples, so subsample={samples} has nothing to do: leave "
            "one of them out."
        )
    kept = []
    for number in range(len(group)):
        positions = group.shares.positions(number)
        generator = seeds.numpy_generator(seed, "subsample", group.name(number))
        kept.append(positions[in_proportion(labels[positions], samples, generator)])
    return replace(group, shares=Shares(kept))


def with_own_mix(client: Client, labels: Tensor, seed: int) -> Client:
    """Tested on as many images of its domain's test set as have the class mix of its training images."""
    generator, of_test = seeds.generator(seed, "own tests", client.name), labels[client.test]
    wanted, there = (torch.bincount(of, minlength=int(labels.max()) + 1) for of in (labels[client.train], of_test))
    both = ((wanted > 0) & (there > 0)).nonzero().flatten()
    if not len(both):
        return replace(client, test=no_indices())
    scarce = both[(there[both] / wanted[both]).argmin()]  # the class that there are the fewest test images of
    counts = (2 * wanted * there[scarce] + wanted[scarce]) // (2 * wanted[scarce])  # to the nearest
    drawn = torch.randperm(len(of_test), generator=generator)
    kept = [drawn[of_test[drawn] == label][: counts[label]] for label in both.tolist()]
    return replace(client, test=client.test[torch.cat(kept).sort().values])


def refuse_transforms(federation: Federation) -> None:
    """Transforms are made for pictures: of floats, those that would do something else than they say are refused."""
    x = federation.images[:2]
    for transform in (federation.train_transform, federation.test_transform) if x.is_floating_point() else ():
        for part in getattr(transform, "transforms", (transform,)):
            try:
                fits = not hasattr(part, "of_colours") and part(x, torch.full((len(x), part.draws), 0.5)).ndim == x.ndim
            except (RuntimeError, IndexError, ValueError):
                fits = False
            if not fits:
                raise DataError(
                    f"The transform {type(part).__name__} does not fit float samples of shape {tuple(x.shape[1:])}: "
                    "leave it out, or give uint8 images."
                )


def warn_of_gaps(dataset: Dataset, federation: Federation) -> None:
    """What cannot be both trained on and tested."""
    everyone, classes, labels = list(federation.one_of_each()), federation.classes, federation.labels
    trained, tested, there = (
        {*labels[each_once(parts)].tolist()}
        for parts in (
            [federation.training_images()],
            [client.test for client in everyone],
            [split.all() for split in dataset.domains.values()],
        )
    )
    seen = {client.domain for client in federation.one_of_each(unseen=False)}
    with_tests = {client.domain for client in everyone if len(client.test)}
    single = [
        f"{domain}/{classes[label]}"
        for domain, split in dataset.domains.items()
        for label in (torch.bincount(labels[split.all()]) == 1).nonzero().flatten().tolist()
        if domain not in {client.name for client in federation.unseen}
    ]
    # Where a domain is left out to be tested, the others may need no test set; and nobody can train without any.
    untested = [name for name in federation.domains if with_tests & seen and name not in with_tests]
    for what, names in (
        ("classes without a sample", [name for label, name in enumerate(classes) if label not in there]),
        ("classes that are tested and that nobody trains on", [classes[label] for label in sorted(tested - trained)]),
        ("domains without test samples", untested),
        ("classes with a single sample, which cannot be both trained on and tested", single),
    ):
        if names:
            log.warning("'%s' has %s: %s.", federation.name, what, quoted(names))
