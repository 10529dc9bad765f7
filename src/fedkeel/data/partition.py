"""Partitions: how a domain's training images are cut into clients.

Every partition cuts each domain by itself, so a client has one domain, and `clients` counts the clients of each
domain. The cut is exact: each training image goes to one client; only with `dirichlet(samples=...)`, for more clients
than there are images for, do they share some. It depends on the seed and the domain's name only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
import numpy.typing as npt

from fedkeel import seeds, spec
from fedkeel.data.population import IntArray, Shares
from fedkeel.errors import DataError
from fedkeel.options import Count, Range, checked
from fedkeel.registry import Registry

Positions = list[IntArray]
REDRAWS = 100


class Partition:
    """Cuts one domain's training samples into clients.

    A new one overrides `cut`; or `shares`, if its clients are to be made on demand.

    >>> class Halves(Partition):
    ...     def cut(self, domain, labels, generator):
    ...         return np.array_split(generator.permutation(len(labels)), 2)
    >>> [len(part) for part in Halves().cut("scan", np.zeros(9), np.random.default_rng(0))]
    [5, 4]

    `@PARTITIONS.register("halves")` above it makes it known by name.
    """

    def shares(self, domain: str, labels: IntArray, seed: int) -> Shares:
        """Who gets which of the samples."""
        return Shares(self.cut(domain, labels, seeds.numpy_generator(seed, "partition", domain)))

    def cut(self, domain: str, labels: IntArray, generator: np.random.Generator) -> Positions:
        """For each client, the positions of its samples in `labels`."""
        raise NotImplementedError


PARTITIONS: Registry[Partition] = Registry("partition")
"""The partitions by name."""


def build(partition: str | Partition) -> Partition:
    """A partition from its text, e.g. `dirichlet(alpha=0.3, clients=10)`."""
    if isinstance(partition, Partition):
        return partition
    parsed = spec.parse(partition)
    return PARTITIONS.build(parsed.name, **parsed.options)


@dataclass(frozen=True)
class Evenly(Partition):
    """Each class of a domain split evenly over `clients` clients, or over as many as `counts` has for the domain."""

    clients: int = 1
    counts: Mapping[str, int] = field(default_factory=dict)

    def cut(self, domain: str, labels: IntArray, generator: np.random.Generator) -> Positions:
        counts = {as_typed(name): count for name, count in self.counts.items()}
        clients = counts.get(as_typed(domain), self.clients)
        # Dealt class after class in turn: per class and in all, clients differ by one sample at most.
        dealt = np.concatenate([np.empty(0, np.int64), *shuffled_classes(labels, generator)])
        return [np.sort(dealt[client::clients]) for client in range(clients)]


@PARTITIONS.register("domains", paper="FedBN (Li et al., ICLR 2021)")
def domains() -> Evenly:
    """One client per domain: every client's images look different."""
    return Evenly()


@PARTITIONS.register("even")
def even(clients: Count = 10) -> Evenly:
    """Each class of a domain split evenly over its clients."""
    return Evenly(clients)


@PARTITIONS.register("clients")
def clients_per_domain(**counts: int) -> Evenly:
    """A number of clients for each domain, such as clients(photo=3, sketch=2), each class split evenly."""
    if not counts:
        raise DataError("The partition 'clients' names no domain: write it like 'clients(photo=3, sketch=2)'.")
    return Evenly(counts={name: checked(count, Count, f"The '{name}' of clients") for name, count in counts.items()})


@PARTITIONS.register(
    "dirichlet", paper="Hsu et al., 2019 (arXiv:1909.06335); balanced as in MOON (Li et al., CVPR 2021)"
)
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Label skew: each class is spread over the clients of a domain by a draw from a Dirichlet distribution.

    A draw that leaves a client below `minimum` samples is thrown away and drawn again, at most a hundred times.
    `balanced` gives nothing more to a client that already has its even share, as MOON and FedUV do.

    With `samples`, there may be any number of clients: each has proportions of the classes of its own, and draws that
    many images by them, which others may have too. `minimum` and `balanced` are then not needed.
    """

    alpha: Annotated[float, Range(1e-6, 1e6)] = 0.5  # the smaller, the fewer classes a client has
    clients: Count = 10  # of each domain
    minimum: Annotated[int, Range(0)] = 10
    balanced: bool = False
    samples: Count | None = None

    def shares(self, domain: str, labels: IntArray, seed: int) -> Shares:
        if self.samples is None:
            return super().shares(domain, labels, seed)
        if self.balanced or len(labels) < self.samples:
            raise DataError(
                f"Each client of '{domain}' draws {self.samples} of {len(labels)} training samples: leave balanced out "
                "and ask for no more samples than there are."
            )
        return DirichletDraws(self, domain, labels, seed)

    def cut(self, domain: str, labels: IntArray, generator: np.random.Generator) -> Positions:
        members = shuffled_classes(labels, generator)
        for _ in range(REDRAWS + 1 if len(labels) >= self.clients * max(self.minimum, 1) else 0):
            counts = self.draw([len(own) for own in members], generator)
            if counts.sum(axis=0).min() >= self.minimum:
                pieces = [np.split(own, np.cumsum(row)[:-1]) for own, row in zip(members, counts, strict=True)]
                return [np.sort(np.concatenate(own)) for own in zip(*pieces, strict=True)]
        raise DataError(
            f"dirichlet cannot give the {len(labels)} training samples of '{domain}' to {self.clients} clients of at "
            f"least {max(self.minimum, 1)} each, in {REDRAWS} redraws: ask for fewer clients, lower minimum, raise "
            "alpha, set balanced=true, or let clients share samples by samples=N."
        )

    def draw(self, sizes: Sequence[int], generator: np.random.Generator) -> IntArray:
        """How many images of each class each client gets, of shape (classes, clients)."""
        counts = np.zeros((len(sizes), self.clients), np.int64)
        share = sum(sizes) / self.clients
        for row, size in enumerate(sizes):
            p = generator.dirichlet(np.full(self.clients, float(self.alpha)))
            if self.balanced:
                room = counts.sum(axis=0) < share
                # When alpha is tiny, every client with room may have drawn exactly 0.
                p = p * room if (p * room).sum() > 0 else room.astype(np.float64)
                p = p / p.sum()
            bounds = np.minimum((np.cumsum(p)[:-1] * size).astype(np.int64), size)
            counts[row] = np.diff(bounds, prepend=0, append=size)
        return counts


class DirichletDraws(Shares):
    """Each client's own draw: proportions of the classes, and `samples` different images by them.

    The proportions are q_c = n_c g_c / sum_k n_k g_k, with g from a symmetric Dirichlet distribution and n_c the number
    of images of class c: what an exact cut tends to when it has many clients, since there too a client gets the share
    g_c of each class. A class that is used up leaves what is missing to the others. Client 17 is the same whether
    there are a hundred clients or a million.
    """

    def __init__(self, wanted: Dirichlet, domain: str, labels: IntArray, seed: int) -> None:
        self._wanted, self._domain, self._seed = wanted, domain, seed
        self.sizes = np.broadcast_to(np.int64(wanted.samples or 0), wanted.clients)
        self._by_class = np.argsort(labels, kind="stable")
        _, self._members = np.unique(labels, return_counts=True)
        self._first = np.cumsum(self._members) - self._members

    def positions(self, number: int) -> IntArray:
        generator = seeds.numpy_generator(self._seed, "partition", self._domain, number)
        counts = self.counts(generator)
        drawn = [
            self._first[c] + generator.choice(self._members[c], counts[c], replace=False, shuffle=False)
            for c in np.flatnonzero(counts)
        ]
        return np.sort(self._by_class[np.concatenate(drawn)])

    def counts(self, generator: np.random.Generator) -> IntArray:
        """How many images of each class a client has."""
        shares = generator.dirichlet(np.full(len(self._members), float(self._wanted.alpha))) * self._members
        counts = np.zeros(len(self._members), np.int64)
        while missing := int(self.sizes[0] - counts.sum()):
            room = self._members - counts
            open_shares = np.where(room > 0, shares, 0.0)
            # When alpha is tiny, the classes that are left may have drawn exactly 0.
            p = open_shares if open_shares.sum() > 0 else room.astype(np.float64)
            counts += np.minimum(generator.multinomial(missing, p / p.sum()), room)
        return counts

    def used(self) -> IntArray:
        return np.arange(len(self._by_class))


@PARTITIONS.register("shards", paper="FedAvg (McMahan et al., AISTATS 2017)")
@dataclass(frozen=True)
class Shards(Partition):
    """Label skew: each client of a domain gets equally many shards, each of one class.

    A class is cut into a number of shards that follows its size, so a client has at most `classes_per_client` classes.
    """

    clients: Count = 10  # of each domain
    classes_per_client: Count = 2

    def cut(self, domain: str, labels: IntArray, generator: np.random.Generator) -> Positions:
        members = shuffled_classes(labels, generator)
        shards = self.clients * self.classes_per_client
        if not len(members) <= shards <= len(labels):
            raise DataError(
                f"The partition makes {shards} shards, and the domain '{domain}' has {len(members)} classes and "
                f"{len(labels)} training samples: let clients times classes_per_client lie between these two."
            )
        # Each class has one shard for sure; the rest follows the sizes, and no shard is empty.
        counts = 1 + apportion(np.array([len(own) for own in members]) - 1, shards - len(members))
        pieces = [piece for own, count in zip(members, counts, strict=True) for piece in np.array_split(own, count)]
        order = generator.permutation(shards).reshape(self.clients, self.classes_per_client)
        return [np.sort(np.concatenate([pieces[i] for i in row])) for row in order]


def shuffled_classes(labels: IntArray, generator: np.random.Generator) -> list[IntArray]:
    """Where the samples of each class are, each class in a random order."""
    return [generator.permutation(np.flatnonzero(labels == label)) for label in np.unique(labels)]


def in_proportion(labels: IntArray, total: int, generator: np.random.Generator) -> IntArray:
    """`total` positions, drawn so that each class keeps its share, sorted."""
    classes = shuffled_classes(labels, generator)
    counts = apportion(np.array([len(own) for own in classes], np.int64), total)
    return np.sort(np.concatenate([np.empty(0, np.int64), *(own[:n] for own, n in zip(classes, counts, strict=True))]))


def apportion(sizes: npt.NDArray[np.int64], total: int) -> IntArray:
    """Cut `total` in proportion to `sizes` into whole numbers, none above its size (largest remainders)."""
    if sizes.sum() == 0:
        return np.zeros(len(sizes), np.int64)
    # Whole-number arithmetic: the result must not depend on how a machine rounds.
    scaled = sizes * total
    counts = scaled // sizes.sum()
    order = np.argsort(-(scaled % sizes.sum()), kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return np.asarray(counts, np.int64)


def as_typed(domain: str) -> str:
    """A domain's name as an option: options are identifiers, so a dash or a blank is typed as an underscore."""
    return domain.replace("-", "_").replace(" ", "_")
