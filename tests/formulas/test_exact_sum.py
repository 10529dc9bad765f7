"""Sums that nodes make of their clients' updates: the same bits whoever adds up whom, and the mean as it was."""

from __future__ import annotations

import doctest
import math
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedkeel.core.state import Tensors
from fedkeel.formulas import exact_sum
from fedkeel.formulas.aggregation import weighted_mean
from fedkeel.formulas.exact_sum import ExactSum

quick = settings(max_examples=50)
seeds = st.integers(0, 2**32 - 1)
float_types = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
weights_of = st.lists(st.integers(1, 10**9), min_size=1, max_size=8)


def states(count: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 0.1) -> list[Tensors]:
    """Where clients began, and what became of each: weights, one number, nothing, a counter and a truth value."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    start = {"w": draw(3, 5), "one": draw()}
    made: list[Tensors] = []
    for number in range(count + 1):
        moved = {name: t + scale * draw(*t.shape) if number else t for name, t in start.items()}
        state = {name: tensor.to(dtype) for name, tensor in moved.items()}
        state["none"] = torch.empty(0, 2, dtype=dtype)
        state["count"] = torch.randint(0, 1000, (2,), generator=generator)
        state["seen"] = torch.rand(3, generator=generator) > 0.5
        made.append(state)
    return made


def added(origin: Tensors, clients: Sequence[Tensors], weights: Sequence[int], most: int) -> ExactSum:
    total = ExactSum(origin, most)
    for client, weight in zip(clients, weights, strict=True):
        assert total.add(client, weight)
    return total


def equal(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype
        assert torch.equal(tensor, other[name]), name


def test_the_example_in_the_docstring_holds() -> None:
    results = doctest.testmod(exact_sum)
    assert results.attempted > 0
    assert results.failed == 0


@given(weights_of, seeds, float_types, st.data())
@quick
def test_neither_order_nor_grouping_changes_a_bit(
    weights: list[int], seed: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    origin, *clients = states(len(weights), seed, dtype)
    straight = added(origin, clients, weights, sum(weights))
    order = data.draw(st.permutations(range(len(weights))))
    nodes = data.draw(st.lists(st.integers(0, 3), min_size=len(weights), max_size=len(weights)))
    total = ExactSum(origin, sum(weights))
    for node in data.draw(st.permutations(range(4))):
        own = [place for place in order if nodes[place] == node]
        part = added(origin, [clients[place] for place in own], [weights[place] for place in own], sum(weights))
        total.merge(part.sums, part.weight)
    assert total.weight == straight.weight == sum(weights)
    equal(straight.mean(), total.mean())


@given(weights_of, seeds, float_types)
@quick
def test_it_is_the_weighted_mean(weights: list[int], seed: int, dtype: torch.dtype) -> None:
    origin, *clients = states(len(weights), seed, dtype)
    found = added(origin, clients, weights, sum(weights)).mean()
    expected = weighted_mean([{n: t.double() if t.is_floating_point() else t for n, t in c.items()} for c in clients],
                             weights)  # fmt: skip
    finest = 2.0 ** (sum(weights).bit_length() + 4 + 3 - 62)  # of 64 bits; no entry is as large as 2^3
    finest += 1e-14  # and of float64
    rounding = torch.finfo(dtype).eps
    for name, tensor in expected.items():
        assert found[name].dtype == origin[name].dtype
        torch.testing.assert_close(found[name].to(tensor.dtype), tensor, rtol=rounding, atol=finest)


def test_with_a_million_samples_it_is_the_mean_to_the_last_bit_of_float32() -> None:
    """Against fractions, which round nothing."""
    weights = [400_000, 350_001, 249_999]
    origin, *clients = states(3, seed=5)
    found = added(origin, clients, weights, 10**6).mean()["w"]
    for place, number in enumerate(found.flatten().tolist()):
        numbers = [Fraction(float(client["w"].flatten()[place])) for client in clients]
        exact = sum(weight * own for weight, own in zip(weights, numbers, strict=True)) / sum(weights)
        assert abs(float(exact) - number) <= 2.0**-24 * abs(number) + 2.0**-36


@given(weights_of, seeds, st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@quick
def test_identical_clients_give_that_client(weights: list[int], seed: int, dtype: torch.dtype) -> None:
    """Bit for bit, where 64 bits hold the numbers: here none is small beside the largest of its tensor."""
    origin, client = states(1, seed)
    grain = 2.0**-12

    def coarse(state: Tensors) -> Tensors:
        return {n: ((t / grain).round() * grain).to(dtype) if t.is_floating_point() else t for n, t in state.items()}

    origin, client = coarse(origin), coarse(client)
    equal(added(origin, [client] * len(weights), weights, sum(weights)).mean(), client)


@given(st.integers(1, 10**9), seeds, float_types)
@quick
def test_clients_that_change_nothing_give_what_they_began_with(weight: int, seed: int, dtype: torch.dtype) -> None:
    """However small the numbers are beside others."""
    origin = states(0, seed, dtype)[0] | {"var": torch.tensor([1e2, 1e-3, 1e-6, 0.0], dtype=dtype)}
    equal(added(origin, [origin] * 3, [weight] * 3, 3 * weight).mean(), origin)


numbers = st.one_of(st.just(0.0), st.floats(2.0**-100, 2.0**10, width=32))


@given(st.lists(numbers, min_size=1, max_size=4), numbers, st.integers(1, 2**34))
@settings(max_examples=300)
def test_a_mean_of_variances_is_not_negative(clients: list[float], start: float, weight: int) -> None:
    """Of channels that died, say, whose variance is small beside the others'."""
    origin = {"var": torch.tensor([1e3, start])}
    sent = [{"var": torch.tensor([1e3, variance])} for variance in clients]
    found = added(origin, sent, [weight] * len(sent), weight * len(sent)).mean()["var"][1].item()
    assert found >= 0
    lowest, highest = min(start, *clients), max(start, *clients)
    slack = 1e-6 * highest  # of float32
    assert lowest - slack <= found <= highest + slack  # nor beyond those that it is of


def test_all_clients_at_zero_give_zero() -> None:
    """A sum of this size, divided as a float, comes out too large: the variance would be -1e-16."""
    origin, dead, weight = {"var": torch.tensor([0.8599796891212463])}, {"var": torch.zeros(1)}, 10_396_275_797
    equal(added(origin, [dead], [weight], weight).mean(), dead)


def test_of_counters_and_truth_values_the_largest_counts() -> None:
    origin = {"count": torch.tensor([7, 2**40]), "seen": torch.tensor([False, False])}
    one = {"count": torch.tensor([9, 2**40]), "seen": torch.tensor([True, False])}
    two = {"count": torch.tensor([8, 2**40 + 1]), "seen": torch.tensor([False, False])}
    mean = added(origin, [one, two], [1, 10**9], 10**9 + 1).mean()
    equal(mean, {"count": torch.tensor([9, 2**40 + 1]), "seen": torch.tensor([True, False])})


def test_complex_numbers_have_both_parts() -> None:
    origin = {"phase": torch.tensor([1 + 1j, 0j])}
    clients = [{"phase": torch.tensor([1 + 3j, 2j])}, {"phase": torch.tensor([3 + 1j, 0j])}]
    equal(added(origin, clients, [1, 1], 2).mean(), {"phase": torch.tensor([2 + 2j, 1j])})


@given(st.integers(1, 10**9), st.sampled_from([1e6, -1e6, 1e15, 3e38, math.inf, math.nan]), seeds)
@quick
def test_a_change_that_is_too_large_is_refused_and_nothing_of_it_counts(most: int, huge: float, seed: int) -> None:
    origin, one, two = states(2, seed)
    total = added(origin, [one], [1], most + 1)
    before = {name: tensor.clone() for name, tensor in total.sums.items()}
    two["w"][1, 2] = huge
    assert not total.add(two, most)
    assert total.weight == 1
    equal(total.sums, before)
    assert not ExactSum(origin, most).add(two, most)


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=6), st.booleans(), st.floats(0.0, 2.0**70))
@settings(max_examples=200)
def test_what_is_accepted_fits(weights: list[int], negative: bool, size: float) -> None:
    """Changes as large as they may be, all in one direction, with all of the weight."""
    change = -size if negative else size
    origin, client = {"w": torch.zeros(1, dtype=torch.float64)}, {"w": torch.tensor([change], dtype=torch.float64)}
    total = ExactSum(origin, sum(weights))
    if all(total.add(client, weight) for weight in weights):
        assert total.mean()["w"].item() == pytest.approx(change, rel=1e-12, abs=2.0**-22)


def test_changes_of_several_times_the_largest_entry_are_accepted() -> None:
    for largest in (0.5, 1.0, 100.0, 1e12):
        origin = {"w": torch.tensor([largest, 0.0])}
        assert ExactSum(origin, 10**6).add({"w": torch.tensor([0.0, 8 * max(1.0, largest)])}, 10**6)


def test_what_is_taken_in_is_not_the_clients_own() -> None:
    origin, one, two = states(2, seed=1)
    kept = {name: tensor.clone() for name, tensor in one.items()}
    total = ExactSum(origin, 2)
    total.merge(added(origin, [one], [1], 2).sums, 1)
    total.add(two, 1)
    equal(one, kept)


def test_nothing_but_empty_tensors() -> None:
    origin = {"none": torch.empty(0, 3)}
    equal(added(origin, [origin], [5], 5).mean(), origin)
