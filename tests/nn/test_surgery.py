"""Surgery changes what it says and nothing else."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from fedkeel import models
from fedkeel.errors import MethodError
from fedkeel.nn import (
    HybridBatchNorm2d,
    remove_normalisation,
    replace_modules,
    to_group_norm,
)
from fedkeel.nn.surgery import change_input, change_output, group_count


class Shared(nn.Module):
    """One batch norm in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(4)
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), self.first)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(self.first(x))
        return out


def test_a_shared_module_stays_one_object() -> None:
    model = Shared().eval()
    names = replace_modules(
        model, lambda _, m: isinstance(m, nn.BatchNorm2d), lambda _, m: nn.GroupNorm(2, m.num_features)
    )
    assert names == ["first", "block.1"]
    assert model.first is model.block[1]
    assert not model.first.training
    assert list(model.state_dict())[:2] == ["first.weight", "first.bias"]


@pytest.mark.parametrize(
    ("channels", "groups", "expected"),
    [
        *[(64, 32, 32), (16, 32, 8), (24, 32, 8), (144, 32, 24), (192, 32, 32)],  # FedWon
        *[(64, 2, 2), (15, 2, 1), (64, 1, 1)],  # HBN's group norm and layer norm
        *[(48, 32, 24), (40, 32, 20), (7, 32, 7), (1, 32, 1), (24, 8, 8)],
    ],
)
def test_the_number_of_groups_follows_the_papers_and_always_divides(channels: int, groups: int, expected: int) -> None:
    assert group_count(channels, groups) == expected
    assert channels % group_count(channels, groups) == 0


def test_group_norm_keeps_the_affine_parameters_and_normalises_each_sample() -> None:
    model = nn.Sequential(nn.BatchNorm2d(6, eps=1e-3), nn.BatchNorm2d(6, affine=False))
    nn.init.normal_(model[0].weight)
    nn.init.normal_(model[0].bias)
    model[0].bias.requires_grad_(False)
    weight, bias = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    to_group_norm(model, 2)
    x = torch.randn(3, 6, 4, 4)
    y = model[0](x)
    grouped = x.reshape(3, 2, -1)
    expected = (grouped - grouped.mean(2, keepdim=True)) / (grouped.var(2, correction=0, keepdim=True) + 1e-3).sqrt()
    expected = expected.reshape(x.shape) * weight.view(1, 6, 1, 1) + bias.view(1, 6, 1, 1)
    torch.testing.assert_close(y, expected)
    assert not model[0].bias.requires_grad
    assert model[1].weight is None


def test_group_norm_on_vectors_never_has_groups_of_one_number() -> None:
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8))
    to_group_norm(model, 32)
    assert model[1].num_groups == 4
    assert model(torch.randn(3, 5)).abs().sum() > 0


def test_layer_norm_is_one_group_and_groups_may_depend_on_the_layer() -> None:
    model = models.build("alexnet", num_classes=2, dropout=0.0)
    to_group_norm(model, lambda name, _: 32 if name in ("encoder.bn1", "encoder.bn2") else 64)  # FedWon Table 7
    assert [m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)] == [32, 32, 64, 64, 64]
    model = models.build("simple_cnn", num_classes=2)
    to_group_norm(model, 1)
    assert {m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)} == {1}


def test_a_model_without_batch_norm_is_refused() -> None:
    with pytest.raises(MethodError, match="no batch norm"):
        to_group_norm(nn.Sequential(nn.Linear(2, 2)))


def test_remove_normalisation_leaves_hybrid_ones_and_gives_convolutions_a_bias() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        HybridBatchNorm2d(4),
        nn.Conv2d(4, 4, 1),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm2d(4),
        nn.LayerNorm([6, 6]),
    )
    kept = model[3].bias
    x = torch.randn(2, 3, 8, 8)
    expected = model[0](x)
    assert remove_normalisation(model) == ["1", "4", "5", "6"]
    assert isinstance(model[2], HybridBatchNorm2d)
    assert torch.equal(model[0].bias, torch.zeros(4))
    assert model[0].bias.requires_grad
    assert model[3].bias is kept
    assert torch.equal(model[1](model[0](x)), expected)


def test_what_a_module_gets_and_gives_is_changed_without_a_new_name_and_a_copy_has_its_own_change() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    names, x = list(model.state_dict()), torch.randn(3, 2)
    expected = model[1](-model[0](2 * x)).relu()
    change_input(model, lambda x: 2 * x)
    change_input(model[1], torch.neg)
    change_output(model, torch.relu)
    assert torch.equal(model(x), expected)
    assert list(model.state_dict()) == names

    model.add_module("shift", nn.Linear(1, 1))
    change_output(model[1], model.shift)
    copied = copy.deepcopy(model)
    nn.init.zeros_(copied.shift.weight)
    nn.init.ones_(copied.shift.bias)
    with_its_own = copied[1](x)
    assert torch.equal(with_its_own, torch.ones(3, 1))
    assert not torch.equal(model[1](x), with_its_own)
