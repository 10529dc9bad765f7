"""Calibration of a network: what it does to statistics, whatever the batches, the order and the kind of layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedkeel.core.client import Batch
from fedkeel.core.state import batch_norms
from fedkeel.errors import FedkeelError
from fedkeel.nn.calibration import (
    Calibration,
    Calibrator,
    channel_sums,
    moments_of,
    normalised_layers,
    refuse_without_statistics,
)
from fedkeel.nn.hybrid_batch_norm import to_hybrid

CLASSES = 4


def network(seed: int = 0) -> nn.Sequential:
    """Batch norm in two dimensions, with momentum None, and without affine parameters in one."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 5, 3),
        nn.BatchNorm2d(5, momentum=None),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.BatchNorm1d(5, affine=False),
        nn.Linear(5, CLASSES),
    )
    for layer in batch_norms(model).values():  # statistics of the data that it was made for
        layer.momentum = 1.0
    model.train()(torch.randn(400, 3, 8, 8))
    for layer in batch_norms(model).values():
        layer.momentum = 0.1
    model[4].momentum = None
    return model.eval()


def images(count: int, seed: int = 1, *, scale: float = 2.0, shift: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(count, 3, 8, 8, generator=generator) + shift


def batches(x: Tensor, size: int) -> Callable[[], Iterator[Batch]]:
    return lambda: (Batch(part, torch.full((len(part),), -1)) for part in x.split(size) if len(part))


def calibrated(
    model: nn.Module, x: Tensor, size: int = 1000, prior: float = 16.0, *, always: bool = False
) -> tuple[nn.Module, Calibration]:
    changed = copy.deepcopy(model)
    return changed, Calibrator(changed, changed).calibrate(batches(x, size), prior, always=always)


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.state_dict().items() if "running" in name}


@pytest.mark.parametrize("count", [0, 1])
def test_fewer_than_two_images_say_nothing_of_a_site(count: int) -> None:
    model = network()
    changed, record = calibrated(model, images(count))
    assert record.share == 0
    assert all(torch.equal(tensor, changed.state_dict()[name]) for name, tensor in model.state_dict().items())
    assert str(record) == f"{count} samples do not tell how far the site is: 0 % of it is taken."
    assert calibrated(model, images(count), prior=4, always=True)[1].share == pytest.approx(count / 5)


def test_all_images_without_a_prior_give_the_sites_moments() -> None:
    """What batch norm computes itself when all images are one batch, in the same network."""
    x = images(30)
    changed, record = calibrated(network(), x, prior=0, always=True)
    assert record.share == 1
    by_itself = copy.deepcopy(changed)
    for layer in batch_norms(by_itself).values():
        layer.momentum = 1.0
    by_itself.train()(x)
    for name, layer in batch_norms(by_itself).items():
        mean, unbiased = layer.running_mean, layer.running_var
        assert mean is not None
        assert unbiased is not None
        values = 30 if isinstance(layer, nn.BatchNorm1d) else 30 * {"1": 36, "4": 16}[name]
        found = batch_norms(changed)[name]
        torch.testing.assert_close(found.running_mean, mean)
        torch.testing.assert_close(found.running_var, unbiased * (values - 1) / values)
    # And so evaluation says what training on that batch would.
    torch.testing.assert_close(changed.eval()(x), by_itself.train()(x), rtol=1e-4, atol=1e-5)


@settings(max_examples=25, deadline=None)
@given(count=st.integers(2, 40), size=st.integers(1, 41), seed=st.integers(0, 5), always=st.booleans())
def test_neither_order_nor_batch_size_matters(count: int, size: int, seed: int, always: bool) -> None:
    model, x = network(seed), images(count, seed)
    whole, first = calibrated(model, x, always=always)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    other, second = calibrated(model, x[order], size, always=always)
    assert first.share == pytest.approx(second.share, abs=1e-6)
    for name, tensor in statistics(whole).items():
        torch.testing.assert_close(statistics(other)[name], tensor, rtol=1e-4, atol=1e-5)


def test_the_mixture_is_linear_between_the_federation_and_the_site() -> None:
    """Of the first layer, whose input does not depend on any other's statistics."""
    model, x = network(), images(48)
    mixed, record = calibrated(model, x, prior=16, always=True)
    site, _ = calibrated(model, x, prior=0, always=True)
    assert record.share == pytest.approx(48 / 64)
    for name in ("1.running_mean", "1.running_var"):
        expected = torch.lerp(statistics(model)[name], statistics(site)[name], 48 / 64)
        torch.testing.assert_close(statistics(mixed)[name], expected)


def test_a_site_like_the_federation_is_left_alone_and_one_that_looks_different_is_not() -> None:
    model = network()
    same, other = images(200, scale=1.0, shift=0.0), images(200, scale=1.0, shift=6.0)
    assert calibrated(model, same)[1].share < 0.3
    assert calibrated(model, other)[1].share > 0.6
    assert calibrated(model, other)[1].distance > 10 * calibrated(model, same)[1].distance


def test_calibrating_twice_changes_little_once_the_site_is_reached() -> None:
    x = images(100)
    once, _ = calibrated(network(), x, prior=0, always=True)
    again, record = calibrated(once, x)
    assert record.share == 0
    assert record.distance == pytest.approx(0, abs=1e-6)
    assert all(torch.equal(tensor, statistics(again)[name]) for name, tensor in statistics(once).items())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.BatchNorm1d(3), (3,)),
        (nn.BatchNorm1d(3), (3, 7)),
        (nn.BatchNorm2d(3, affine=False), (3, 4, 4)),
        (nn.BatchNorm3d(3, momentum=None), (3, 2, 4, 4)),
    ],
)
def test_every_dimension(layer: nn.Module, shape: tuple[int, ...]) -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(2).mean(2) if x.ndim > 2 else x

    model = nn.Sequential(layer, Mean()).eval()
    x = 3 * torch.randn(20, *shape, generator=torch.Generator().manual_seed(0)) + 5
    for size in (20, 6):
        changed, _ = calibrated(model, x, size, prior=0, always=True)
        values = x.transpose(0, 1).flatten(1)
        torch.testing.assert_close(statistics(changed)["0.running_mean"], values.mean(1))
        torch.testing.assert_close(statistics(changed)["0.running_var"], values.var(1, correction=0))


def test_hbn_is_calibrated_like_batch_norm() -> None:
    plain = network()
    hybrid = copy.deepcopy(plain)
    to_hybrid(hybrid)
    ours, expected = (calibrated(model.eval(), images(20), always=True)[0] for model in (hybrid, plain))
    for name, tensor in statistics(expected).items():
        torch.testing.assert_close(statistics(ours)[name], tensor)


def test_layers_without_statistics_are_passed_over_and_a_network_without_any_is_refused() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3, track_running_stats=False), nn.BatchNorm1d(3)).eval()
    assert list(normalised_layers(model)) == ["1"]
    with pytest.raises(FedkeelError, match="nothing to calibrate"):
        refuse_without_statistics(nn.Sequential(nn.GroupNorm(1, 4)), "The model")


def test_a_layer_that_the_forward_pass_leaves_out_keeps_its_statistics() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    model = Partly().eval()
    changed, record = calibrated(model, torch.randn(9, 3) + 4, prior=0, always=True)
    assert list(record.layers) == ["used"]
    assert torch.equal(statistics(changed)["unused.running_mean"], torch.zeros(3))
    assert not torch.equal(statistics(changed)["used.running_mean"], torch.zeros(3))


def test_the_distance_is_that_of_both_moments_in_units_of_what_single_images_differ_by() -> None:
    """By hand, of the layer that no other comes before."""
    model, x = network(), images(12)
    _, record = calibrated(model, x, size=5)
    layer = model[1]
    y = model[0](x).detach().double().numpy()
    mean, var = (tensor.double().numpy()[:, None, None] for tensor in (layer.running_mean, layer.running_var))
    normal = (y - mean) / np.sqrt(var + layer.eps)
    squared = [
        ((moment.mean(0) - usual) ** 2).sum() / moment.var(0, ddof=1).sum()
        for moment, usual in ((normal.mean((2, 3)), 0), ((normal**2).mean((2, 3)), 1))
    ]
    assert record.layers["1"] == pytest.approx(sum(squared) / 2, rel=1e-5)


def test_the_record_says_what_was_seen_and_a_person_reads_it() -> None:
    _, record = calibrated(network(), images(64, shift=6.0))
    assert sum(record.mix) == pytest.approx(1)
    assert record.distance == pytest.approx(sum(record.layers.values()) / 3)
    assert record.to_dict()["share"] == record.share
    told = str(Calibration(1200, 16.0, distance=1253.24, explained=0.754, trust=0.9994, share=0.9, mix=[1], layers={}))
    assert "are 1253 from the federation's" in told
    assert "explain a distance of 0.754.\nSo 100 % is taken for their look, and with 1,200 samples" in told


def test_sums_of_batches_add_up() -> None:
    x = images(10)
    mean, variance = moments_of(channel_sums(x[:3]) + channel_sums(x[3:]))
    torch.testing.assert_close(mean, x.double().mean((0, 2, 3)))
    torch.testing.assert_close(variance, x.double().var((0, 2, 3), correction=0))
