"""How far a site's images are from the federation's, and how much of that is their look: see docs/calibration-rule.md.

A layer's moments over the n images of a site differ from the federation's for three reasons: the site's images look
different, its classes are mixed differently, and n images are few. In units of the variance of single images, the
latter two explain a squared distance of at most

    e = max(sum_c (p_c - u_c)^2, 1 / n)        p: the class mix of the images, u: the federation's

on average, with a standard deviation of e sqrt(2 / v), where v = 1 / sum_c p_c^2 - 1, at least 1, is the number of
classes that are free to vary. What is beyond both is the look's share of the measured distance d, and so is the share
of the site's own statistics, but for a prior worth m images:

    share = max(0, 1 - e (1 + sqrt(2 / v)) / d) n / (n + m)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STEPS = 100  # of expectation-maximisation
CHANGE = 1e-6  # of a class's share, below which it ends


def class_mix(probabilities: Tensor, mix: Tensor | None = None) -> Tensor:
    """The class mix of images from what a model says of them, (n, C), by maximum likelihood (Saerens et al., 2002).

    A model takes classes to be as frequent as in training, `mix` (C,), by default all the same, so the mean of its
    probabilities is too close to that. Expectation-maximisation finds the mix under which they are most likely:
    p_c = mean_i r_ic, with r_ic proportional to probabilities_ic p_c / mix_c.

    >>> unsure = torch.tensor([[0.6, 0.4]]).repeat(100, 1)  # all a little more like the first class
    >>> [round(share, 3) for share in class_mix(unsure).tolist()]
    [1.0, 0.0]
    """
    wide = probabilities.double()
    trained = wide.new_full((wide.shape[1],), 1 / wide.shape[1]) if mix is None else mix.to(wide)
    found = trained
    for _ in range(STEPS):
        likely = wide * (found / trained.clamp_min(1e-12))
        before, found = found, (likely / likely.sum(1, keepdim=True).clamp_min(1e-300)).mean(0)
        if float((found - before).abs().max()) < CHANGE:
            break
    return found


def squared_distance(mean: Tensor, variance: Tensor, usual: float) -> Tensor:
    """d of one moment of one layer: how far its mean over images is from the usual, in units of its variance over them.

    Both are (C,), of values that are normalised by the federation's statistics, so that a loud channel does not drown
    the others: the usual first moment is 0, and the usual second one is 1.

    >>> squared_distance(torch.tensor([2.0, 0.0]), torch.tensor([1.0, 3.0]), usual=0.0).item()
    1.0
    """
    return (mean - usual).square().sum() / variance.sum().clamp_min(1e-12)


def explained_distance(site_mix: Tensor, images: int, mix: Tensor | None = None) -> float:
    """What a class mix and chance explain of d, with a standard deviation on top: e (1 + sqrt(2 / v)).

    >>> even = torch.full((10,), 0.1)
    >>> round(explained_distance(even, 64), 3), round(explained_distance(torch.eye(10)[:2].mean(0), 64), 3)
    (0.023, 0.966)
    """
    usual = torch.full_like(site_mix, 1 / len(site_mix)) if mix is None else mix.to(site_mix)
    e = max(float((site_mix - usual).square().sum()), 1 / images)
    free = max(1.0, 1 / float(site_mix.square().sum()) - 1)
    return e * (1 + math.sqrt(2 / free))


def look(distance: float, explained: float) -> float:
    """The share of the distance that is beyond the explained.

    >>> look(4.0, 1.0), look(0.5, 1.0)
    (0.75, 0.0)
    """
    return max(0.0, 1 - explained / distance) if distance > explained else 0.0


def site_share(trust: float, images: int, prior: float) -> float:
    """The share of the site's statistics in the mixture: as much as the look, but for a prior worth so many images.

    >>> site_share(1.0, images=48, prior=16)
    0.75
    """
    return trust * images / (images + prior) if images else 0.0
