from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from fedkeel.core.types import Classifier
from fedkeel.nn.draws import Dropout, normal, own_dropout, uniform
from fedkeel.trust.privacy import sample_gradients

KINDS = {
    nn.Dropout: (40, 50, 20),
    nn.Dropout1d: (40, 50, 7),
    nn.Dropout2d: (40, 50, 3, 3),
    nn.Dropout3d: (9, 50, 2, 2, 2),
}


def key(seed: int) -> Tensor:
    return torch.randint(0, 2**31, (), generator=torch.Generator().manual_seed(seed))


def test_numbers_are_uniform_and_never_0_or_1() -> None:
    u = torch.cat([uniform(key(0), torch.tensor(step), 1000) for step in range(200)]).double()
    assert u.min() > 0
    assert u.max() < 1
    counts = torch.histc(u.float(), bins=64, min=0, max=1)
    expected = len(u) / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 63 + 5 * math.sqrt(2 * 63)  # chi squared, five sigma


def test_steps_keys_and_neighbours_are_independent() -> None:
    n = 20_000
    base = uniform(key(1), torch.tensor(5), n)
    keys = torch.cat([uniform(torch.tensor(k), torch.tensor(0), 1) for k in range(n)])  # of keys in a row
    others = [uniform(key(1), torch.tensor(6), n), uniform(key(2), torch.tensor(5), n), base.roll(1), base.roll(7)]
    for one, other in [*((base, other) for other in others), (keys[1:], keys[:-1])]:
        assert abs(float(torch.corrcoef(torch.stack([one, other]).double())[0, 1])) < 5 / math.sqrt(n)


def test_normal_numbers_have_the_moments_of_the_normal_distribution() -> None:
    z = normal(key(4), torch.tensor(0), (100_000,)).double()
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):  # spread: variance of z^power
        assert float((z**power).mean()) == pytest.approx(moment, abs=5 * math.sqrt(spread / len(z)))


# -- dropout -----------------------------------------------------------------------------------------------------------
def drawn(module: nn.Module, seed: int = 5) -> Dropout:
    (layer,) = own_dropout(nn.Sequential(module))
    layer.begin(torch.Generator().manual_seed(seed))
    return layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p", [0.2, 0.7, 1.0])
def test_a_layer_drops_as_torchs_does(kind: type[nn.Module], p: float) -> None:
    x = torch.ones(KINDS[kind])
    ours, plain = drawn(kind(p))(x), kind(p)(x)
    torch.testing.assert_close(ours.unique(), plain.unique())
    assert float((ours == 0).float().mean()) == pytest.approx(p, abs=0.06)
    for y in (ours, plain):  # one channel of a sample: whole, or place by place
        channels = (y == 0).flatten(2).float().mean(2)
        assert bool((channels % 1 == 0).all()) == (kind is not nn.Dropout or p == 1)
    assert torch.equal(drawn(kind(p)).eval()(x), x)


def test_each_forward_draws_anew_and_the_same_key_draws_the_same_in_every_layout() -> None:
    layer, x = drawn(nn.Dropout(0.5)), torch.ones(4, 8, 6, 6)
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second)
    layer.begin(torch.Generator().manual_seed(5))
    assert torch.equal(layer(x.contiguous(memory_format=torch.channels_last)), first)
    layer.begin(torch.Generator().manual_seed(6))
    assert not torch.equal(layer(x), first)


def test_only_torchs_own_layers_that_drop_something_are_swapped_once() -> None:
    class Own(nn.Dropout):
        def forward(self, input: Tensor) -> Tensor:
            return input + 1

    shared = nn.Dropout(0.5)
    model = nn.Sequential(nn.Linear(3, 3), shared, nn.Sequential(shared), Own(), nn.AlphaDropout(), nn.Dropout(0.0))
    names, state = list(model.state_dict()), torch.get_rng_state()
    (layer,) = own_dropout(model)
    assert own_dropout(model) == [layer]
    assert model[1] is model[2][0] is layer
    assert [type(module) for module in model[3:]] == [Own, nn.AlphaDropout, nn.Dropout]
    assert list(model.state_dict()) == names
    twin = copy.deepcopy(model)
    twin[1](torch.ones(3))
    assert int(layer.counter) == 0
    assert torch.equal(state, torch.get_rng_state())


def test_under_differential_privacy_each_sample_has_a_mask_of_its_own() -> None:
    model = Classifier(nn.Dropout(0.5), nn.Linear(12, 2), feature_dim=12, num_classes=2)
    x, y = torch.ones(6, 12), torch.zeros(6, dtype=torch.int64)
    with torch.random.fork_rng():
        dropped = sample_gradients(model.train(), x, y)[0]["head.weight"][:, 0] == 0
    assert len({tuple(mask) for mask in dropped.tolist()}) > 1
