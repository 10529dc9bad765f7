from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedkeel import models
from fedkeel.core.types import Classifier
from fedkeel.errors import MethodError
from fedkeel.nn.draws import normal
from fedkeel.nn.feature_augmentation import FeatureAugmentation, augment_features, emphasis


def layer(channels: int = 3, **options: float) -> FeatureAugmentation:
    made = FeatureAugmentation(channels, **options)
    made.key.fill_(12345)
    made.mean_variance.copy_(torch.linspace(0, 2, channels))
    made.std_variance.copy_(torch.linspace(1, 0, channels))
    made.next_step()
    return made


def maps(n: int = 5, channels: int = 3, side: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, channels, side, side, generator=generator) * 2 + torch.arange(channels)[:, None, None]


def by_hand(
    x: NDArray[np.float64], noise: NDArray[np.float64], s_mu: list[float], s_sigma: list[float]
) -> NDArray[np.float64]:
    """The paper's formulas, number by number."""
    n, channels, height, width = x.shape
    mu, sigma = np.zeros((n, channels)), np.zeros((n, channels))
    for b in range(n):
        for c in range(channels):
            pixels = [x[b, c, i, j] for i in range(height) for j in range(width)]
            mu[b, c] = sum(pixels) / len(pixels)
            sigma[b, c] = math.sqrt(sum((p - mu[b, c]) ** 2 for p in pixels) / len(pixels) + 1e-6)

    def scope(statistic: NDArray[np.float64], s: list[float]) -> list[float]:
        g = [1 / (1 + 1 / (value + 1e-6)) for value in s]
        result = []
        for c in range(channels):
            mean = sum(statistic[:, c]) / n
            variance = sum((value - mean) ** 2 for value in statistic[:, c]) / n + 1e-6
            result.append(math.sqrt((1 + channels * g[c] / sum(g)) * variance))
        return result

    over_mu, over_sigma = scope(mu, s_mu), scope(sigma, s_sigma)
    y = np.zeros_like(x)
    for b in range(n):
        for c in range(channels):
            new_mu = mu[b, c] + over_mu[c] * noise[0, b, c]
            new_sigma = sigma[b, c] + over_sigma[c] * noise[1, b, c]
            y[b, c] = new_sigma * (x[b, c] - mu[b, c]) / sigma[b, c] + new_mu
    return y


def test_statistics_are_drawn_as_in_the_paper():
    made, x = layer(p=1.0), maps()
    noise = normal(made.key, 2 * made.counter + 1, (2, 5, 3)).double().numpy()
    wanted = by_hand(x.double().numpy(), noise, made.mean_variance.tolist(), made.std_variance.tolist())
    torch.testing.assert_close(made(x), torch.from_numpy(wanted).float(), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(made(x), x, atol=0.1)


def test_flattened_maps_are_the_same_maps():
    made, x = layer(p=1.0), maps()
    torch.testing.assert_close(made(x.flatten(1)), made(x).flatten(1))
    last = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(made(last), made(x))


def test_it_acts_in_the_share_p_of_the_steps_and_leaves_the_maps_bit_identical_in_the_others():
    made, x = layer(p=0.3), maps()
    acted = []
    for _ in range(400):
        made.next_step()
        acted.append(not torch.equal(made(x), x))
    assert 0.3 * 400 - 5 * math.sqrt(84) < sum(acted) < 0.3 * 400 + 5 * math.sqrt(84)


def test_every_forward_of_a_step_draws_the_same_the_next_anew_and_a_single_sample_or_a_test_nothing():
    made, x = layer(p=1.0), maps()
    first = made(x)
    assert torch.equal(made(x), first)
    made.next_step()
    assert not torch.allclose(made(x), first, atol=0.1)
    assert torch.equal(made(x[:1]), x[:1])
    assert torch.equal(made.eval()(x), x)


def test_moving_averages_begin_with_the_first_batch_and_count_each_step_once():
    made, x = layer(p=0.0, momentum=0.9), maps()
    other = 3 * maps(7)
    made(x)
    made(x)  # a second forward of the same step
    mean, std = x.mean(dim=(0, 2, 3)), (x.var(dim=(2, 3), correction=0) + 1e-6).sqrt().mean(dim=0)
    torch.testing.assert_close(made.running_mean, mean)
    torch.testing.assert_close(made.running_std, std)
    made.next_step()
    made(other)
    torch.testing.assert_close(made.running_mean, 0.9 * mean + 0.1 * other.mean(dim=(0, 2, 3)))


def test_channels_in_which_clients_differ_are_augmented_more():
    gamma = emphasis(torch.tensor([0.0, 0.1, 1.0, 10.0]))
    assert (gamma.diff() > 0).all()
    assert float(gamma.mean()) == pytest.approx(1)
    torch.testing.assert_close(emphasis(torch.full((5,), 0.37)), torch.ones(5))
    torch.testing.assert_close(emphasis(torch.zeros(5)), torch.ones(5))


PLACES = {
    "simple_cnn": [16, 32, 64],
    "digits_cnn": [64, 64, 128],
    "alexnet": [64, 192, 384, 256, 256],  # as in the paper's Table 10
    "small_cnn": [16, 16, 32, 32, 32, 64, 64, 64],
    "resnet10": [64, 64, 128, 256, 512],  # stem and stages
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLACES)
def test_there_is_one_after_each_block_of_convolutions_of_every_network(name):
    side = {"alexnet": 64, "digits_cnn": 28}.get(name, 32)
    model = models.build(name, num_classes=3, image_size=side)
    entries = list(model.state_dict())
    before = copy.deepcopy(model)
    layers = augment_features(model, p=1.0)
    assert [made.channels for made in layers] == PLACES[name]
    assert list(model.state_dict()) == entries
    calls: list[int] = []
    for i, made in enumerate(layers):
        made.register_forward_hook(lambda *_, i=i: calls.append(i))
    x = torch.rand(2, 3, side, side)
    torch.testing.assert_close(model.eval()(x).logits, before.eval()(x).logits)
    assert calls == list(range(len(layers)))


def test_a_copy_of_the_model_has_layers_of_its_own():
    model = models.build("simple_cnn", num_classes=3, image_size=32)
    augment_features(model, p=1.0)
    twin = copy.deepcopy(model)
    twin.feature_augmentation[0].next_step()
    twin(torch.rand(2, 3, 32, 32))
    assert float(twin.feature_augmentation[0].running_mean.abs().sum()) > 0
    assert float(model.feature_augmentation[0].running_mean.abs().sum()) == 0


def test_a_network_that_it_does_not_fit_is_refused():
    flat = Classifier(nn.Flatten(), nn.Linear(12, 2), 12, 2)
    with pytest.raises(MethodError, match="choose a convolutional model"):
        augment_features(flat)
    with pytest.raises(MethodError, match="expected maps of 3 channels"):
        layer()(torch.rand(2, 4, 5, 5))
