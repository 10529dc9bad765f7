"""Each server rule against an independent computation, the properties it promises, and its corner cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedkeel.core import state
from fedkeel.errors import FedkeelError
from fedkeel.formulas.aggregation import (
    fair_prototype,
    mean_prototype,
    moving_average,
    pooled_moments,
    prototype_start,
    weighted_mean,
)

quick = settings(deadline=None, max_examples=25)
seeds = st.integers(0, 2**32 - 1)
float_types = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spread(point: np.ndarray, prototypes: np.ndarray) -> float:
    """Eq. 26's objective as loops."""
    distances = [np.sqrt(sum((a - b) ** 2 for a, b in zip(point, row, strict=True))) for row in prototypes]
    mean = sum(distances) / len(distances)
    return sum((d - mean) ** 2 for d in distances) / len(distances)


# ------------------------------------------------------------------------------------------------- weighted mean


def entries(draw: st.DrawFn) -> dict[str, Tensor]:
    floats = st.floats(-1e6, 1e6, width=32)
    return {
        "w": torch.tensor(draw(st.lists(floats, min_size=3, max_size=3))),
        "half": torch.tensor(draw(st.lists(st.floats(-100, 100), min_size=2, max_size=2))).half(),
        "running_var": torch.tensor(draw(st.lists(st.floats(0, 1e6, width=32), min_size=2, max_size=2))),
        "double": torch.tensor([draw(floats)], dtype=torch.float64),
        "num_batches_tracked": torch.tensor(draw(st.integers(0, 2**62))),
    }


states = st.composite(entries)()
weights = st.integers(1, 10**6)


@settings(max_examples=100, deadline=None)
@given(states, st.lists(weights, min_size=1, max_size=6))
def test_the_mean_of_identical_clients_is_that_client_bit_for_bit(client: state.Tensors, shares: list[float]) -> None:
    mean = weighted_mean([state.clone(client) for _ in shares], shares)
    for name, tensor in client.items():
        assert mean[name].dtype == tensor.dtype
        assert torch.equal(mean[name], tensor)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(states, weights), min_size=1, max_size=5))
def test_the_mean_is_the_weighted_mean_in_double_precision(clients: list[tuple[state.Tensors, int]]) -> None:
    mean = weighted_mean([tensors for tensors, _ in clients], [share for _, share in clients])
    total = sum(share for _, share in clients)
    for name in ("w", "running_var", "double"):
        exact = sum(tensors[name].double() * share for tensors, share in clients) / total
        scale = max(float(tensors[name].abs().max()) for tensors, _ in clients)
        assert torch.allclose(mean[name].double(), exact, rtol=0, atol=1e-6 * scale + 1e-12)  # type: ignore[arg-type]
    assert mean["half"].dtype == torch.float16
    counter = mean["num_batches_tracked"]
    assert counter.dtype == torch.int64
    assert int(counter) == max(int(tensors["num_batches_tracked"]) for tensors, _ in clients)
    assert state.keep_variances_positive(mean)["running_var"].min() >= 0


def test_half_precision_is_averaged_in_single() -> None:
    # In float16, 2048 + 1/4 * 1 is 2048, four times over; the mean of 2048, 2050, 2050, 2050 is not.
    clients = [{"w": torch.tensor([v], dtype=torch.float16)} for v in (2048.0, 2050.0, 2050.0, 2050.0)]
    assert weighted_mean(clients, [1, 1, 1, 1])["w"].item() == 2050.0


def test_truth_values_and_complex_numbers_have_their_rules() -> None:
    clients = [
        {"mask": torch.tensor([True, False]), "phase": torch.tensor([1 + 1j])},
        {"mask": torch.tensor([False, False]), "phase": torch.tensor([3 - 1j])},
    ]
    mean = weighted_mean(clients, [1, 1])
    assert mean["mask"].tolist() == [True, False]
    assert mean["phase"].tolist() == [2 + 0j]


# ------------------------------------------------------------------------------------------------ pooled moments


def moments(parts: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """What clients report: means, biased variances, counts."""
    return [p.mean(0) for p in parts], [p.var(0, correction=0) for p in parts], [len(p) for p in parts]


@quick
@given(seeds, st.lists(st.integers(1, 30), min_size=1, max_size=6), st.floats(-1e3, 1e3))
def test_pooled_parts_have_the_moments_of_the_whole(seed: int, sizes: list[int], offset: float) -> None:
    assume(sum(sizes) > 1)
    whole = normal(sum(sizes), 3, seed=seed) + offset
    parts = [part + i for i, part in enumerate(whole.split(sizes))]  # clients differ in their means
    mean, variance = pooled_moments(*moments(parts))
    everything = np.concatenate([part.numpy() for part in parts])
    assert np.allclose(mean.numpy(), np.mean(everything, axis=0), rtol=1e-10, atol=1e-12)
    assert np.allclose(variance.numpy(), np.var(everything, axis=0, ddof=1), rtol=1e-8)


def test_a_plain_mean_of_variances_is_not_the_variance_of_the_whole() -> None:
    parts = [normal(40, 3), normal(10, 3, seed=1) + 5]
    means, variances, counts = moments(parts)
    _, pooled = pooled_moments(means, variances, counts)
    assert (pooled > 2 * weighted_mean([{"v": v} for v in variances], counts)["v"]).all()


@quick
@given(seeds, float_types, st.lists(st.integers(1, 500), min_size=1, max_size=6))
def test_the_pooled_variance_is_never_negative_and_has_the_dtype_of_the_inputs(
    seed: int, dtype: torch.dtype, counts: list[int]
) -> None:
    means = (normal(len(counts), 4, seed=seed) * 100).to(dtype)
    variances = (normal(len(counts), 4, seed=seed + 1).clamp_min(0) * 1e-6).to(dtype)
    mean, variance = pooled_moments(means, variances, counts)
    assert mean.dtype == variance.dtype == dtype
    assert (variance >= 0).all()
    assert variance.isfinite().all()


@quick
@given(seeds, float_types, st.lists(st.integers(1, 500), min_size=1, max_size=6))
def test_the_pooled_mean_of_equal_means_is_that_mean_bit_for_bit(
    seed: int, dtype: torch.dtype, counts: list[int]
) -> None:
    mean = normal(4, seed=seed).to(dtype)
    pooled, variance = pooled_moments([mean] * len(counts), [torch.zeros_like(mean)] * len(counts), counts)
    assert torch.equal(pooled, mean)
    assert (variance == 0).all()


def test_a_single_sample_keeps_the_variance_it_came_with() -> None:
    mean, variance = pooled_moments([torch.tensor([3.0])], [torch.tensor([0.0])], [1])
    assert (mean, variance) == (3, 0)
    _, mixture = pooled_moments([torch.tensor([3.0])], [torch.tensor([0.5])], [1])
    assert mixture == 0.5


def test_shares_instead_of_counts_give_the_biased_variance_of_the_union() -> None:
    whole = normal(20, 2)
    means, variances, counts = moments(list(whole.split([5, 15])))
    _, variance = pooled_moments(means, variances, [n / 20 for n in counts])
    assert torch.allclose(variance, whole.var(0, correction=0))


def test_a_client_without_data_has_no_say_whatever_it_reports() -> None:
    means, variances, counts = moments(list(normal(10, 2).split([4, 6])))
    nothing = torch.full((2,), torch.nan)
    with_it = pooled_moments([nothing, *means], [nothing, *variances], [0, *counts])
    without = pooled_moments(means, variances, counts)
    assert torch.equal(with_it[0], without[0])
    assert torch.equal(with_it[1], without[1])


@pytest.mark.parametrize(
    ("means", "variances", "counts"),
    [
        (torch.zeros(2, 3), torch.zeros(1, 3), [1, 1]),
        (torch.zeros(2, 3), torch.zeros(2, 3), [1]),
        (torch.zeros(2, 3), torch.zeros(2, 3), [0, 0]),
        (torch.zeros(2, 3), torch.zeros(2, 3), [3, -1]),
    ],
)
def test_moments_that_make_no_sense_are_refused(means: Tensor, variances: Tensor, counts: list[int]) -> None:
    with pytest.raises(FedkeelError, match="how many values its moments are of"):
        pooled_moments(means, variances, counts)


# ------------------------------------------------------------------------------------------------ moving average


@settings(max_examples=100, deadline=None)
@given(states, states, st.floats(0, 1))
def test_a_moving_average_lies_between_and_keeps_dtypes(
    old: state.Tensors, new: state.Tensors, momentum: float
) -> None:
    result = moving_average(old, new, momentum)
    for name in ("w", "half", "running_var", "double"):
        low, high = torch.minimum(old[name], new[name]), torch.maximum(old[name], new[name])
        slack = 1e-3 * torch.maximum(low.abs(), high.abs())
        assert ((result[name] >= low - slack) & (result[name] <= high + slack)).all()
        assert result[name].dtype == new[name].dtype
    assert torch.equal(result["num_batches_tracked"], new["num_batches_tracked"])
    assert torch.equal(moving_average(old, new, 0.0)["w"], old["w"])
    assert torch.equal(moving_average(old, new, 1.0)["w"], new["w"])


# ---------------------------------------------------------------------------------------------------- prototypes


@quick
@given(seeds, st.integers(1, 8))
def test_the_start_weighs_each_prototype_by_its_distance_to_the_mean(seed: int, k: int) -> None:
    p = normal(k, 3, seed=seed)
    mean = sum(p.numpy()) / k
    assert np.allclose(mean_prototype(p).numpy(), mean)
    distances = [np.sqrt(((row - mean) ** 2).sum()) for row in p.numpy()]
    if k > 1:
        expected = sum(d / sum(distances) * row for d, row in zip(distances, p.numpy(), strict=True))
        assert np.allclose(prototype_start(p).numpy(), expected)


@quick
@given(seeds, st.integers(1, 8), float_types)
def test_equal_prototypes_have_themselves_as_mean_start_and_fair_prototype(
    seed: int, k: int, dtype: torch.dtype
) -> None:
    p = normal(5, seed=seed).to(dtype)
    for rule in (mean_prototype, prototype_start, fair_prototype):
        result = rule(p.expand(k, -1))
        assert torch.equal(result, p)
        assert result.dtype == dtype


@quick
@given(seeds, st.integers(1, 12), st.integers(1, 20), float_types)
def test_the_fair_prototype_never_has_a_larger_distance_variance_than_the_start(
    seed: int, k: int, width: int, dtype: torch.dtype
) -> None:
    p = normal(k, width, seed=seed).to(dtype)
    fair, start = fair_prototype(p), prototype_start(p)
    assert fair.dtype == dtype
    assert fair.shape == (width,)
    assert fair.isfinite().all()
    rows = p.double().numpy()
    assert spread(fair.double().numpy(), rows) <= spread(start.double().numpy(), rows) + 1e-15


@pytest.mark.parametrize("seed", range(6))
def test_no_point_of_a_grid_around_the_fair_prototype_is_fairer(seed: int) -> None:
    p = normal(5, 2, seed=seed).numpy()
    fair = fair_prototype(p)
    grid = np.linspace(-0.5, 0.5, 81)
    points = fair + np.stack(np.meshgrid(grid, grid), axis=-1).reshape(-1, 2)
    distances = np.sqrt(((points[:, None] - p) ** 2).sum(-1))
    least = ((distances - distances.mean(1, keepdims=True)) ** 2).mean(1).min()
    assert spread(fair, p) <= least + 1e-7


@quick
@given(seeds)
def test_one_prototype_is_its_own_and_two_have_their_midpoint(seed: int) -> None:
    p = normal(2, 6, seed=seed)
    assert torch.equal(fair_prototype(p[:1]), p[0])
    assert torch.allclose(fair_prototype(p), (p[0] + p[1]) / 2)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_scaling_and_moving_the_prototypes_scales_and_moves_the_fair_one(scale: float) -> None:
    p, shift = normal(6, 3), normal(3, seed=1) * scale
    expected = fair_prototype(p) * scale + shift
    assert torch.allclose(fair_prototype(p * scale + shift), expected, rtol=1e-3, atol=1e-3 * scale)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_numpy_in_numpy_out(dtype: type) -> None:
    p = normal(5, 3).numpy().astype(dtype)
    fair = fair_prototype(p)
    assert isinstance(fair, np.ndarray)
    assert fair.dtype == dtype
    assert np.array_equal(fair, fair_prototype(torch.from_numpy(p)).numpy())
    assert np.array_equal(fair_prototype(np.asfortranarray(p)[::-1]), fair_prototype(p[::-1].copy()))
