from __future__ import annotations

import doctest
import math

import pytest
import torch
from torch import Tensor

from fedkeel.nn import draws
from fedkeel.nn.draws import new_key, normal, uniform


def key(seed: int) -> Tensor:
    return new_key(torch.Generator().manual_seed(seed))


def test_numbers_are_uniform_and_never_0_or_1():
    u = torch.cat([uniform(key(0), torch.tensor(step), 1000) for step in range(200)]).double()
    assert u.min() > 0
    assert u.max() < 1
    counts = torch.histc(u.float(), bins=64, min=0, max=1)
    expected = len(u) / 64
    assert float(((counts - expected) ** 2 / expected).sum()) < 63 + 5 * math.sqrt(2 * 63)  # chi squared, five sigma


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]).double())[0, 1])


@pytest.mark.slow
def test_steps_keys_and_neighbours_are_independent():
    n = 20_000
    base = uniform(key(1), torch.tensor(5), n)
    for other in (
        uniform(key(1), torch.tensor(6), n),
        uniform(key(1), torch.tensor(4), n),
        uniform(key(2), torch.tensor(5), n),
        base.roll(1),
        base.roll(7),
    ):
        assert abs(correlation(base, other)) < 5 / math.sqrt(n)
        assert not torch.equal(base, other)
    first = torch.cat([uniform(key(1), torch.tensor(step), 1) for step in range(2000)])  # one number of each step
    assert abs(correlation(first[1:], first[:-1])) < 5 / math.sqrt(2000)
    assert abs(float(first.mean()) - 0.5) < 5 * math.sqrt(1 / 12 / 2000)
    keys = torch.cat([uniform(torch.tensor(k), torch.tensor(0), 1) for k in range(2000)])  # of keys in a row
    assert abs(correlation(keys[1:], keys[:-1])) < 5 / math.sqrt(2000)


def test_the_same_key_and_counter_give_the_same_numbers():
    assert torch.equal(uniform(key(3), torch.tensor(9), 50), uniform(key(3), torch.tensor(9), 80)[:50])
    assert torch.equal(normal(key(3), torch.tensor(9), (4, 5)), normal(key(3), torch.tensor(9), (4, 5)))


def test_normal_numbers_have_the_moments_of_the_normal_distribution():
    z = normal(key(4), torch.tensor(0), (100_000,)).double()
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):  # spread: variance of z^power
        assert float((z**power).mean()) == pytest.approx(moment, abs=5 * math.sqrt(spread / len(z)))
    assert torch.isfinite(z).all()


def test_no_integer_overflows():
    """The largest key and a counter of many rounds give what exact integers give."""

    def mixed(x: int) -> int:
        for _ in range(2):
            x = ((x ^ (x >> 16)) * draws._MULTIPLIER) % 2**32
        return x ^ (x >> 16)

    k, counter = 2**31 - 1, 10**6
    stream = mixed(mixed(k) ^ (counter * draws._GOLDEN % 2**32))
    wanted = [((mixed(stream ^ mixed(i)) >> 9) + 0.5) / 2**23 for i in range(1, 9)]
    assert uniform(torch.tensor(k), torch.tensor(counter), 8).tolist() == wanted


def test_the_examples_in_the_docstrings_hold():
    results = doctest.testmod(draws)
    assert results.attempted > 0
    assert results.failed == 0
