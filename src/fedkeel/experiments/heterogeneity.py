"""How far clients' data lie apart, in labels and in look, beyond what chance alone gives.

Chance is what is left when the samples are dealt to the clients anew: for looks within each class, which leaves every
client the labels it has. So a look that comes with the labels is in the chance too, and what is above it is the look
alone; of a class that one client has to itself nothing can be said.

Symbols: N samples, K clients, C classes, d numbers that were measured of a sample.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedkeel import seeds
from fedkeel.analysis.snapshot import some_clients
from fedkeel.data.federation import Federation
from fedkeel.engine.batches import middle
from fedkeel.nn.calibration import normalised_layers

MOST_IMAGES, AT_ONCE = 4000, 256  # that are looked at, of all clients together


@dataclass(frozen=True)
class AboveChance:
    """A distance beside what chance gives; made by `above_chance`, which has an example.

    Attributes:
        distance: as it is, from 0 to 1.
        chance: the root of the mean square over the deals.
        deviations: how far the square of the one lies above that of the other, in standard deviations of the deals.
    """

    distance: float
    chance: float
    deviations: float

    @property
    def above(self) -> float:
        """What is left of it without chance, sqrt((x^2 - y^2) / (1 - y^2)): squares add up, distances do not."""
        rest = 1 - self.chance**2
        return math.sqrt(max(0.0, self.distance**2 - self.chance**2) / rest) if rest > 0 else 0.0


def label_distance(labels: Tensor, clients: Tensor) -> Tensor:
    """The total variation distance of a client's label distribution from that of all, mean over the samples.

        x = sum_k n_k / N  1/2 sum_c |n_kc / n_k - n_c / N|

    It is the share of its samples that an average client would have to exchange for some of other classes.

    Args:
        labels, clients: (N,), whole numbers from 0.

    >>> label_distance(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 1, 1])).item()
    0.5
    """
    classes = int(labels.max()) + 1
    counts = torch.bincount(clients * classes + labels, minlength=(int(clients.max()) + 1) * classes)
    counts = counts.view(-1, classes).double()
    expected = counts.sum(1, keepdim=True) * counts.sum(0) / len(labels)
    return (counts - expected).abs().sum() / (2 * len(labels))


def within_classes(values: Tensor, labels: Tensor) -> Tensor:
    """Each number's distance from the mean of its class, in units of its spread: (N, d) and (N,) -> (N, d or fewer).

    Numbers that do not vary within the classes are left out.

    >>> within_classes(torch.tensor([[1.0, 5.0], [3.0, 5.0], [7.0, 6.0], [9.0, 6.0]]), torch.tensor([0, 0, 1, 1])).T
    tensor([[-1.,  1., -1.,  1.]], dtype=torch.float64)
    """
    values = values.double()
    residuals = values - _means(values, labels)[labels]
    spread = residuals.square().mean(0).sqrt()
    varies = spread > 1e-6 * values.square().mean(0).sqrt()
    return residuals[:, varies] / spread[varies]


def look_distance(residuals: Tensor, labels: Tensor, clients: Tensor) -> Tensor:
    """How far the samples of a class at one client lie from those at all, in units of the spread within a class.

        x^2 = sum_c sum_k n_kc |m_kc|^2 / sum_i |r_i|^2,    m_kc the mean of r over the samples of class c at client k

    That is the share of the variation within classes which lies between clients.

    Args:
        residuals: r, (N, d), of `within_classes`.
        labels, clients: (N,), whole numbers from 0.

    >>> residuals, one_class = torch.tensor([[-1.0], [-1.0], [1.0], [1.0]]), torch.zeros(4, dtype=torch.int64)
    >>> look_distance(residuals, one_class, torch.tensor([0, 0, 1, 1])).item()
    1.0
    """
    cells = clients * (int(labels.max()) + 1) + labels
    total = residuals.square().sum().clamp_min(1e-12)
    return (_means(residuals, cells)[cells].square().sum() / total).sqrt()


def shared_classes(labels: Tensor, clients: Tensor) -> Tensor:
    """Which samples are of a class that two clients or more have: (N,) and (N,) -> (N,), bool.

    >>> shared_classes(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]))
    tensor([ True,  True, False])
    """
    pairs = torch.unique(torch.stack([labels, clients]), dim=1)
    return (torch.bincount(pairs[0], minlength=int(labels.max()) + 1) > 1)[labels]


def dealt_anew(clients: Tensor, strata: Tensor, generator: torch.Generator) -> Tensor:
    """The clients of the samples, shuffled among the samples of each stratum: (N,) and (N,) -> (N,).

    >>> dealt_anew(torch.tensor([3, 5, 7]), torch.tensor([0, 1, 2]), torch.Generator())
    tensor([3, 5, 7])
    """
    shuffled = torch.randperm(len(clients), generator=generator)
    shuffled = shuffled[torch.argsort(strata[shuffled], stable=True)]
    dealt = torch.empty_like(clients)
    dealt[torch.argsort(strata, stable=True)] = clients[shuffled]
    return dealt


def above_chance(
    distance: Callable[[Tensor], Tensor], clients: Tensor, strata: Tensor, generator: torch.Generator, deals: int = 50
) -> AboveChance:
    """A distance of the clients of the samples beside that of so many deals, each within the strata.

    >>> labels, clients = torch.arange(600) // 200, torch.arange(600) // 200
    >>> found = above_chance(lambda c: label_distance(labels, c), clients, torch.zeros_like(labels), torch.Generator())
    >>> round(found.distance, 2), round(found.above, 1), found.deviations > 3
    (0.67, 0.7, True)
    """
    square = float(distance(clients)) ** 2
    chance = torch.tensor([float(distance(dealt_anew(clients, strata, generator))) ** 2 for _ in range(deals)])
    mean, deviation = float(chance.mean()), float(chance.std())
    # Deals that are all alike say nothing of how far chance goes, such as those of two samples.
    deviations = (square - mean) / deviation if deviation > 1e-12 else 0.0
    return AboveChance(math.sqrt(square), math.sqrt(mean), deviations)


def _means(values: Tensor, groups: Tensor) -> Tensor:
    """By group: (N, d) and (N,) -> (groups, d)."""
    sums = values.new_zeros(int(groups.max()) + 1, values.shape[1]).index_add_(0, groups, values)
    return sums / torch.bincount(groups, minlength=len(sums)).clamp_min(1)[:, None]


# -- of a federation -------------------------------------------------------------------------------------------------
def distances(federation: Federation, model: nn.Module, seed: int) -> tuple[AboveChance, AboveChance | None]:
    """Of labels, and of looks."""
    clients = some_clients(federation, seed)
    owners = torch.repeat_interleave(torch.arange(len(clients)), torch.tensor([client.samples for client in clients]))
    images = torch.cat([client.train for client in clients])
    labels, one = federation.labels[images], torch.zeros_like(owners)
    deal = seeds.generator(seed, "deals of labels")
    apart = above_chance(lambda dealt: label_distance(labels, dealt), owners, one, deal)
    parts = []
    for number, client in enumerate(clients):
        order = torch.randperm(client.samples, generator=seeds.generator(seed, "looks", client.name))
        parts.append((owners == number).nonzero().flatten()[order[: max(1, MOST_IMAGES // len(clients))]])
    chosen = torch.cat(parts)
    chosen = chosen[shared_classes(labels[chosen], owners[chosen])]
    if not len(chosen):
        return apart, None
    classes = labels[chosen]
    residuals = within_classes(moments(federation, images[chosen], model), classes)
    deal = seeds.generator(seed, "deals of looks")
    return apart, above_chance(lambda dealt: look_distance(residuals, classes, dealt), owners[chosen], classes, deal)


@torch.no_grad()
def moments(federation: Federation, images: Tensor, model: nn.Module) -> Tensor:
    """What the first batch norm would see of an image, or the image itself where there is none: by channel its mean,
    and its second moment about the mean of all. (N,) -> (N, 2 channels)."""
    norm = next(iter(normalised_layers(model).values()), None)
    means, squares, seen = list[Tensor](), list[Tensor](), list[Tensor]()
    hook = norm.register_forward_pre_hook(lambda _, given: seen.append(given[0])) if norm is not None else None
    for some in torch.split(images, AT_ONCE):
        x = federation.test_transform(federation.images[some], middle(len(some), federation.test_transform))
        if norm is not None:
            model(x)
            x = seen[0]
            seen.clear()
        x = x.double().flatten(2) if x.ndim > 2 else x.double().unsqueeze(2)
        means.append(x.mean(2))
        squares.append(x.square().mean(2))
    if hook is not None:
        hook.remove()
    mean, square = torch.cat(means), torch.cat(squares)
    common = mean.mean(0)
    return torch.cat([mean, square - 2 * mean * common + common.square()], dim=1)
