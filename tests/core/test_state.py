from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedkeel.core import state
from fedkeel.core.state import Layout, Role


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.bn = nn.BatchNorm1d(3)
        self.untracked = nn.BatchNorm1d(3, track_running_stats=False)
        self.instance = nn.InstanceNorm2d(3, track_running_stats=True)
        self.register_buffer("centre", torch.zeros(2))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)


class KeepsBatchNorm:
    def is_local(self, name: str) -> bool:
        return name.startswith("bn.")


def test_every_entry_has_its_role() -> None:
    model = Everything()
    roles = state.roles(model)
    assert list(roles) == list(model.state_dict())
    of = {role: {name for name, r in roles.items() if r is role} for role in Role}
    assert of[Role.WEIGHT] == {
        *("first.weight", "second.weight", "bn.weight", "bn.bias", "untracked.weight", "untracked.bias", "frozen")
    }
    assert of[Role.STATISTIC] == {
        *("bn.running_mean", "bn.running_var", "instance.running_mean", "instance.running_var", "centre", "phase")
    }
    assert of[Role.COUNTER] == {"bn.num_batches_tracked", "instance.num_batches_tracked", "mask"}
    assert of[Role.LOCAL] == set()
    assert "cache" not in roles


def test_what_the_method_keeps_is_local_whatever_it_is() -> None:
    layout = Layout(state.roles(Everything(), KeepsBatchNorm()))
    assert layout.local == [f"bn.{n}" for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]
    assert not set(layout.local) & {*layout.weights, *layout.statistics}


def test_loading_is_in_place_and_extracting_copies() -> None:
    model = Everything()
    pointer = model.first.weight.data_ptr()
    state.load(model, {"first.weight": torch.full((3, 3), 2.0)}, {"bn.num_batches_tracked": torch.tensor(7)})
    assert model.first.weight.data_ptr() == pointer
    assert model.second.weight is model.first.weight
    assert model.first.weight.eq(2).all()
    assert model.bn.num_batches_tracked == 7
    taken = Layout(state.roles(model)).extract(model, ["first.weight"])
    model.first.weight.data.zero_()
    assert taken["first.weight"].eq(2).all()
    assert not taken["first.weight"].requires_grad


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
    mean = state.mean([state.clone(client) for _ in shares], shares)
    for name, tensor in client.items():
        assert mean[name].dtype == tensor.dtype
        assert torch.equal(mean[name], tensor)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(states, weights), min_size=1, max_size=5))
def test_the_mean_is_the_weighted_mean_in_double_precision(clients: list[tuple[state.Tensors, int]]) -> None:
    mean = state.mean([tensors for tensors, _ in clients], [share for _, share in clients])
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
    assert state.mean(clients, [1, 1, 1, 1])["w"].item() == 2050.0


def test_truth_values_and_complex_numbers_have_their_rules() -> None:
    clients = [
        {"mask": torch.tensor([True, False]), "phase": torch.tensor([1 + 1j])},
        {"mask": torch.tensor([False, False]), "phase": torch.tensor([3 - 1j])},
    ]
    mean = state.mean(clients, [1, 1])
    assert mean["mask"].tolist() == [True, False]
    assert mean["phase"].tolist() == [2 + 0j]


def test_the_inputs_of_a_mean_are_left_alone() -> None:
    clients = [{"w": torch.tensor([1.0]), "n": torch.tensor(1)}, {"w": torch.tensor([3.0]), "n": torch.tensor(2)}]
    result = state.mean(clients, [1, 1])
    result["w"].zero_()
    result["n"].zero_()
    assert [(c["w"].item(), c["n"].item()) for c in clients] == [(1.0, 1), (3.0, 2)]


def test_the_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        state.mean([], [])


@settings(max_examples=100, deadline=None)
@given(states, states, st.floats(0, 1))
def test_lerp_lies_between_and_keeps_dtypes(old: state.Tensors, new: state.Tensors, momentum: float) -> None:
    result = state.lerp(old, new, momentum)
    for name in ("w", "half", "running_var", "double"):
        low, high = torch.minimum(old[name], new[name]), torch.maximum(old[name], new[name])
        slack = 1e-3 * torch.maximum(low.abs(), high.abs())
        assert ((result[name] >= low - slack) & (result[name] <= high + slack)).all()
        assert result[name].dtype == new[name].dtype
    assert torch.equal(result["num_batches_tracked"], new["num_batches_tracked"])
    assert torch.equal(state.lerp(old, new, 0.0)["w"], old["w"])
    assert torch.equal(state.lerp(old, new, 1.0)["w"], new["w"])


def test_only_variances_are_kept_positive() -> None:
    given = {
        "bn.running_var": torch.tensor([-1.0, 2.0]),
        "bn.running_mean": torch.tensor([-1.0]),
        "head.log_var": torch.tensor([-4.0]),
    }
    kept = state.keep_variances_positive(given)
    assert kept["bn.running_var"].tolist() == [0.0, 2.0]
    assert kept["bn.running_mean"].tolist() == [-1.0]
    assert kept["head.log_var"].tolist() == [-4.0]


def test_arithmetic_and_size() -> None:
    left, right = {"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([1.0, 1.0])}
    assert state.subtract(left, right)["w"].tolist() == [2.0, 3.0]
    assert state.add(left, right, scale=2.0)["w"].tolist() == [5.0, 6.0]
    assert state.nbytes({"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.int64)}) == 28


def test_statistics_are_untouched_as_long_as_all_are_those_of_a_new_layer() -> None:
    statistics = dict(nn.BatchNorm2d(3).named_buffers())
    del statistics["num_batches_tracked"]
    assert state.untouched(statistics)
    for name in statistics:
        changed = statistics[name].clone()
        changed[2] += 1e-6
        assert not state.untouched({**statistics, name: changed})
