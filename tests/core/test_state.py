from __future__ import annotations

import torch
from torch import nn

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
    kept = tuple(f"bn.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked"))


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
