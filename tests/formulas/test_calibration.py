"""The rule of calibration against made-up sites whose classes and looks are known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedkeel.formulas.calibration import class_mix, explained_distance, look, site_share, squared_distance


def posteriors(mix: Tensor, images: int, seed: int, apart: float = 1.5) -> Tensor:
    """What the best classifier for equally frequent classes says of images that come with the frequencies `mix`."""
    generator = torch.Generator().manual_seed(seed)
    classes, labels = len(mix), torch.multinomial(mix, images, replacement=True, generator=generator)
    centres = apart * torch.eye(classes, dtype=torch.float64)
    x = centres[labels] + torch.randn(images, classes, dtype=torch.float64, generator=generator)
    return (-0.5 * torch.cdist(x, centres).square()).softmax(1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mix", [(0.7, 0.3, 0.0, 0.0), (0.25, 0.25, 0.25, 0.25), (0.0, 0.1, 0.1, 0.8)])
def test_the_class_mix_is_found_where_the_mean_of_probabilities_is_not_it(mix: tuple[float, ...], seed: int) -> None:
    wanted = torch.tensor(mix, dtype=torch.float64)
    said = posteriors(wanted, 2000, seed)
    assert (class_mix(said) - wanted).abs().max() < 0.06
    if max(mix) > 0.5:
        assert (said.mean(0) - wanted).abs().max() > 0.1


def test_the_class_mix_sums_to_one_and_needs_no_certainty() -> None:
    said = torch.full((7, 5), 0.2)
    torch.testing.assert_close(class_mix(said), torch.full((5,), 0.2, dtype=torch.float64))
    certain = torch.eye(3).repeat(4, 1)
    torch.testing.assert_close(class_mix(certain), torch.full((3,), 1 / 3, dtype=torch.float64))


def test_a_model_that_was_trained_on_uneven_classes_finds_them_even_where_they_are() -> None:
    """With the federation's mix as it is, a site of the same mix is told to have that one."""
    usual = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    even = posteriors(usual, 4000, seed=3)
    said = even * usual
    said = said / said.sum(1, keepdim=True)
    assert (class_mix(said, usual) - usual).abs().max() < 0.05


def test_classes_that_no_image_can_be_of_do_not_break_it() -> None:
    impossible = torch.zeros(4, 3)
    assert class_mix(impossible).isfinite().all()


def test_the_distance_is_in_units_of_what_single_images_differ_by() -> None:
    mean, variance = torch.tensor([2.0, 4.0]), torch.tensor([0.5, 8.0])
    assert float(squared_distance(mean, variance, 0.0)) == pytest.approx((4 + 16) / (0.5 + 8))
    assert float(squared_distance(mean, variance, 1.0)) == pytest.approx((1 + 9) / (0.5 + 8))
    assert float(squared_distance(torch.zeros(2), torch.zeros(2), 0.0)) == 0.0


@pytest.mark.parametrize("images", [2, 16, 200])
@pytest.mark.parametrize("within", [0.0, 0.5, 1.0])
def test_what_is_explained_bounds_what_class_mix_and_chance_do(images: int, within: float) -> None:
    """Sites of the federation's own look, whose images differ by their class and by themselves, in any proportion:
    on the average over sites, their squared distance in units of the images' variance is no more than e."""
    generator = torch.Generator().manual_seed(images)
    classes, sites, channels = 10, 60, 40
    mix = torch.zeros(classes, dtype=torch.float64)
    mix[:3] = torch.tensor([0.5, 0.3, 0.2])
    distances, bounds = [], []
    for _ in range(sites):
        centres = (1 - within) ** 0.5 * torch.randn(classes, channels, dtype=torch.float64, generator=generator)
        labels = torch.multinomial(mix, images, replacement=True, generator=generator)
        own = within**0.5 * torch.randn(images, channels, dtype=torch.float64, generator=generator)
        mean = (centres[labels] + own).mean(0) - centres.mean(0)
        distances.append(float(mean.square().mean()))  # the variance of an image is 1
        shares = torch.bincount(labels, minlength=classes) / images
        bounds.append(max(float((shares - 0.1).square().sum()), 1 / images))
    assert sum(distances) / sites <= 1.1 * sum(bounds) / sites


def test_more_images_and_a_more_even_mix_explain_less() -> None:
    even, two = torch.full((10,), 0.1), torch.tensor([0.5, 0.5, *[0.0] * 8])
    assert explained_distance(even, 16) > explained_distance(even, 64) > 0
    assert explained_distance(two, 64) > explained_distance(even, 64)
    assert explained_distance(two, 64, mix=two) == pytest.approx((1 + math.sqrt(2)) / 64)  # as uneven as all others


def test_a_site_of_one_class_is_not_beyond_all_measure() -> None:
    one = torch.eye(10)[0]
    assert explained_distance(one, 1000) == pytest.approx((1 + math.sqrt(2)) * 0.9, rel=1e-3)
    assert look(100.0, explained_distance(one, 1000)) > 0.95  # no class is that far from the others


def test_the_look_is_what_is_beyond_the_explained() -> None:
    assert look(0.0, 0.0) == look(0.0, 0.5) == look(0.5, 0.5) == 0.0
    assert look(1.0, 0.25) == 0.75
    assert look(1.0, 0.0) == 1.0
    assert look(math.nan, 0.5) == 0.0  # a model that has diverged is left as it is


def test_the_share_is_that_of_the_images_among_these_and_the_prior() -> None:
    assert site_share(1.0, 0, 0.0) == 0.0
    assert site_share(1.0, 5, 0.0) == 1.0
    assert site_share(0.5, 16, 16.0) == 0.25
