from __future__ import annotations

import copy
import importlib.util
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import dropout as by_another_name
from torch.utils.checkpoint import checkpoint

from fedkeel import models
from fedkeel.errors import FedkeelError
from fedkeel.models import MODELS
from fedkeel.nn.draws import Draws
from fedkeel.nn.dropout import draw_dropout
from fedkeel.trust.privacy import sample_gradients
from tests import tiny

LAYERS = [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout]
SHAPES = {nn.Dropout1d: (40, 50, 7), nn.Dropout2d: (40, 50, 3, 3), nn.Dropout3d: (40, 50, 2, 2, 2)}


def drawn(module: nn.Module, key: int = 5) -> tuple[nn.Module, Draws]:
    model = nn.Sequential(module)
    draws = draw_dropout(model)
    assert draws is not None
    draws.begin(torch.Generator().manual_seed(key))
    return model.train(), draws


def moments_and_wholes(y: Tensor) -> Tensor:
    """Mean, deviation, share of changed entries, share of changed channels: what a kind of dropout can be told by."""
    changed = (y - y.flatten()[y.flatten().abs().argmax()]).abs() > 1e-4
    channels = changed.flatten(2).double()
    return torch.stack([y.mean(), y.std(), changed.double().mean(), (channels.mean(2) % 1 == 0).double().mean()])


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("p", [0.2, 0.7])
def test_a_layer_drops_as_torchs_does(layer: type[nn.Module], p: float) -> None:
    x = torch.ones(SHAPES.get(layer, (40, 50, 20)), dtype=torch.float64)
    torch.manual_seed(0)
    plain = layer(p).train()(x)
    ours = drawn(layer(p))[0](x)
    assert {round(v, 9) for v in ours.unique().tolist()} == {round(v, 9) for v in plain.unique().tolist()}
    torch.testing.assert_close(moments_and_wholes(ours), moments_and_wholes(plain), rtol=0, atol=0.08)


@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_are_those_of_the_entries_that_stay(layer: type[nn.Module]) -> None:
    model, draws = drawn(layer(0.4))
    x = torch.randn(SHAPES.get(layer, (8, 6, 5)), requires_grad=True)
    y = model(x)
    y.sum().backward()
    draws.counter.zero_()
    shifted = model(x.detach() + 1)
    torch.testing.assert_close(x.grad, (shifted - y).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Dropout1d(0.5), (200, 3)), (nn.Dropout2d(0.5), (200, 3)), (nn.Dropout3d(0.5), (64, 2, 2, 2))],
)
def test_inputs_without_a_batch_or_without_pixels(layer: nn.Module, shape: tuple[int, ...]) -> None:
    dropped = (drawn(layer)[0](torch.ones(shape)) == 0).flatten(1).double().mean(dim=1)
    by_channel = set(dropped.tolist()) == {0.0, 1.0}
    assert by_channel == (not isinstance(layer, nn.Dropout2d))


@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_happens_in_evaluation_or_with_p_0_and_nothing_is_left_with_p_1(layer: type[nn.Module]) -> None:
    x = torch.randn(SHAPES.get(layer, (4, 3, 5)))
    for model, draws in (drawn(layer(0.0)), drawn(layer(0.5))):
        assert torch.equal((model.eval() if model[0].p else model)(x), x)  # type: ignore[index]
        assert draws.counter == 0
    assert not drawn(layer(1.0))[0](x).any()


@pytest.mark.parametrize("layer", LAYERS)
def test_inplace_changes_the_tensor_that_was_given_where_torchs_layer_does(layer: type[Any]) -> None:
    x = torch.randn(SHAPES.get(layer, (4, 3, 5)))
    expected = drawn(layer(0.5))[0](x)
    given = x.clone()
    result = drawn(layer(0.5, inplace=True))[0](given)
    assert (result is given) == (layer(0.5, inplace=True)(x) is x)
    torch.testing.assert_close(result, expected)


def test_the_mask_is_the_same_in_every_layout_and_precision() -> None:
    x = torch.ones(4, 8, 6, 6)
    masks = [
        drawn(nn.Dropout(0.3))[0](given) != 0
        for given in (x, x.contiguous(memory_format=torch.channels_last), x.bfloat16(), x.double())
    ]
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert drawn(nn.Dropout(0.3))[0](x.contiguous(memory_format=torch.channels_last)).is_contiguous(
        memory_format=torch.channels_last
    )
    assert drawn(nn.Dropout(0.3))[0](x.bfloat16()).dtype == torch.bfloat16


def test_each_use_and_each_forward_draws_anew_and_the_same_key_draws_the_same() -> None:
    shared = nn.Dropout(0.5)
    model, draws = drawn(nn.ModuleList([shared, nn.Sequential(shared), nn.Dropout(0.5)]))
    x = torch.ones(1000)

    def masks() -> list[Tensor]:
        parts: Any = model[0]  # type: ignore[index]
        return [part(x) for part in (*parts, parts[0])]

    first = masks()
    assert len({tuple(mask.tolist()) for mask in first}) == 4
    draws.begin(torch.Generator().manual_seed(5))
    assert all(torch.equal(a, b) for a, b in zip(first, masks(), strict=True))
    draws.begin(torch.Generator().manual_seed(6))
    assert not any(torch.equal(a, b) for a, b in zip(first, masks(), strict=True))


def test_torchs_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    for layer in LAYERS:
        drawn(layer(0.5))[0](torch.ones(SHAPES.get(layer, (4, 3, 5))))
    assert torch.equal(before, torch.get_rng_state())


class Halved(nn.Dropout):
    """A subclass that only names an option."""

    def __init__(self) -> None:
        super().__init__(0.5)


class Own(nn.Dropout):
    def forward(self, input: Tensor) -> Tensor:
        return input + 1


def test_the_layers_stay_the_same_objects_with_the_same_names() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), Halved(), Own(), nn.MultiheadAttention(4, 2, dropout=0.1))
    before, names = list(model), list(model.state_dict())
    classes = [type(module) for module in model]
    seen: list[int] = []
    model[1].register_forward_hook(lambda *_: seen.append(1))
    assert draw_dropout(model) is draw_dropout(model)
    assert list(model)[: len(before)] == before
    assert list(model.state_dict()) == names
    assert [type(module) is plain for module, plain in zip(before, classes, strict=True)] == [
        True,
        False,
        False,
        True,
        False,
    ]
    assert all(isinstance(module, plain) for module, plain in zip(before, classes, strict=True))
    twin = copy.deepcopy(model)
    twin[1](torch.ones(3))
    model[1](torch.ones(3))
    assert seen == [1, 1]
    assert type(twin[1]) is not nn.Dropout


def test_a_copy_draws_for_itself() -> None:
    model, draws = drawn(nn.Dropout(0.5))
    twin = copy.deepcopy(model)
    twin(torch.ones(3))
    assert draws.counter == 0
    assert twin.dropout_draws.counter == 1  # type: ignore[union-attr]


def test_a_model_without_dropout_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(3, 3), Own())
    assert draw_dropout(model) is None
    assert len(model) == 2
    assert not hasattr(model, "dropout_draws")


# -- attention ---------------------------------------------------------------------------------------------------------
ATTENTIONS: list[dict[str, Any]] = [{}, {"batch_first": True}, {"bias": False}, {"kdim": 6, "vdim": 10}]
ATTENTIONS += [{"add_bias_kv": True, "add_zero_attn": True}]


@pytest.mark.parametrize("options", ATTENTIONS, ids=str)
@pytest.mark.parametrize("batched", [True, False])
def test_attention_weights_are_dropped_between_softmax_and_values(options: dict[str, Any], batched: bool) -> None:
    torch.manual_seed(2)
    attention = nn.MultiheadAttention(8, 2, dropout=0.5, **options).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    batch = (3,) if batched else ()
    first = options.get("batch_first", False)
    q, k, v = (torch.randn(*(batch if first else ()), length, *(() if first else batch), size, dtype=torch.float64)
               for length, size in ((4, 8), (5, options.get("kdim", 8)), (5, options.get("vdim", 8))))  # fmt: skip
    mask = torch.zeros(4, 5, dtype=torch.bool)
    mask[:, 2] = True
    model, draws = drawn(attention)
    nothing_dropped, _ = attention.eval()(q, k, v, attn_mask=mask)
    model.train()
    attention.dropout = 1e-12
    close, _ = attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(close, nothing_dropped)
    # Half of the weights are gone, the others doubled, and what comes out is linear in them: the mean is as without.
    attention.dropout = 0.5
    outs = torch.stack([attention(q, k, v, attn_mask=mask, need_weights=False)[0] for _ in range(150)])
    spread = outs.std(dim=0) / math.sqrt(len(outs))
    assert ((outs.mean(dim=0) - nothing_dropped).abs() < 5 * spread + 1e-9).all()
    _, weights = attention(q, k, v, attn_mask=mask, average_attn_weights=False)
    plain = attention.eval()(q, k, v, attn_mask=mask, average_attn_weights=False)[1]
    assert weights.shape == plain.shape
    torch.testing.assert_close(weights, torch.where(weights == 0, 0, 2 * plain))
    assert ((weights == 0) & (plain != 0)).any()
    assert draws.counter > 150


def test_a_transformer_layer_draws_nothing_from_torch() -> None:
    model, draws = drawn(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=True))
    x, before = torch.randn(2, 5, 8), torch.get_rng_state()
    first = model(x)
    assert torch.equal(before, torch.get_rng_state())
    assert draws.counter == 4
    draws.counter.zero_()
    assert torch.equal(model(x), first)


# -- functions that a forward calls itself ----------------------------------------------------------------------------
def drop_path(x: Tensor, p: float, training: bool, scaled: bool) -> Tensor:
    """As timm's."""
    if p == 0 or not training:
        return x
    mask = x.new_empty((len(x), *[1] * (x.ndim - 1))).bernoulli_(1 - p)
    return x * (mask.div_(1 - p) if scaled else mask)


class DropPath(nn.Module):
    def __init__(self, drop_prob: float, scale_by_keep: bool = True) -> None:
        super().__init__()
        self.drop_prob, self.scale_by_keep = drop_prob, scale_by_keep

    def forward(self, x: Tensor) -> Tensor:
        return drop_path(x, self.drop_prob, self.training, self.scale_by_keep)


@pytest.mark.parametrize("scaled", [True, False])
def test_paths_are_dropped_for_whole_samples(scaled: bool) -> None:
    before = torch.get_rng_state()
    y = drawn(DropPath(0.25, scaled))[0](torch.ones(400, 3, 2, 2))
    each = y.flatten(1)
    assert (each == each[:, :1]).all()
    assert {round(v, 5) for v in y.unique().tolist()} == {0.0, round(1 / 0.75, 5) if scaled else 1.0}
    assert 60 < (each[:, 0] == 0).sum() < 140
    assert torch.equal(before, torch.get_rng_state())


class Calls(nn.Module):
    """A forward that draws with a function of its own, in a method of its own."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)

    def head(self, x: Tensor) -> Tensor:
        assert F.dropout is not None  # what the code names is what counts
        result: Tensor = self.function(x, self.training)
        return result


CALLS: dict[str, Any] = {
    "dropout": lambda x, training: F.dropout(x, 0.3, training),
    "torch.dropout": lambda x, training: torch.dropout(x, 0.3, training),
    "dropout2d": lambda x, training: F.dropout2d(x, 0.3, training),
    "alpha_dropout": lambda x, training: F.alpha_dropout(x, 0.3, training),
    "in place": lambda x, training: F.dropout(x.clone(), 0.3, training, inplace=True),
    "rand": lambda x, training: x + torch.rand(x.shape) * training,
    "rand of sizes": lambda x, training: x + torch.rand(*x.shape, dtype=x.dtype, device=x.device) * training,
    "randn": lambda x, training: x + torch.randn(x.shape[0], 1, 1, 1) * training,
    "rand_like": lambda x, training: x + torch.rand_like(x) * training,
    "randn_like": lambda x, training: x + torch.randn_like(x, dtype=torch.float64) * training,
    "bernoulli": lambda x, training: x * torch.bernoulli(torch.full_like(x, 0.5)) if training else x,
    "bernoulli_": lambda x, training: x * torch.empty_like(x).bernoulli_(0.5) if training else x,
}


@pytest.mark.parametrize("name", CALLS)
def test_functions_that_a_forward_calls_draw_from_the_same_place(name: str) -> None:
    model, draws = drawn(Calls(CALLS[name]))
    x, before = torch.ones(6, 5, 4, 4), torch.get_rng_state()
    first, second = model(x), model(x)
    assert torch.equal(before, torch.get_rng_state())
    assert draws.counter == 2
    assert not torch.equal(first, second)
    draws.counter.zero_()
    assert torch.equal(model(x), first)
    assert torch.equal(model.eval()(x), x)


class Rated(nn.Module):
    """Its rate has the name of the function."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class Renamed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return by_another_name(x, 0.5, self.training)


class Noted(nn.Dropout):
    """Leaves the drawing to torch's layer."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


@pytest.mark.parametrize("module", [Rated, Renamed, Noted])
def test_however_a_forward_comes_to_dropout_it_draws_from_the_same_place(module: type[nn.Module]) -> None:
    model, draws = drawn(module())
    x, before = torch.ones(6, 50), torch.get_rng_state()
    first = model(x)
    assert torch.equal(before, torch.get_rng_state())
    assert draws.counter == 1
    assert set(first.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(model.eval()(x), x)


def test_a_generator_of_its_own_stays_its_own() -> None:
    model, draws = drawn(Calls(lambda x, _: torch.rand(x.shape, generator=torch.Generator().manual_seed(3))))
    assert torch.equal(model(torch.ones(4)), torch.rand(4, generator=torch.Generator().manual_seed(3)))
    assert draws.counter == 0


FUSED: list[dict[str, Any]] = [{}, {"is_causal": True}, {"attn_mask": "bool"}, {"attn_mask": "float"}]
FUSED += [{"scale": 0.3}, {"enable_gqa": True}]


@pytest.mark.parametrize("options", FUSED, ids=str)
def test_fused_attention_drops_between_softmax_and_values(options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    heads = 2 if options.get("enable_gqa") else 4
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, heads, 5, 8), torch.randn(2, heads, 5, 8)
    if kind := options.get("attn_mask"):
        mask = torch.rand(5, 5) < 0.7
        mask.fill_diagonal_(True)
        options = {"attn_mask": mask if kind == "bool" else torch.randn(5, 5)}
    attend = F.scaled_dot_product_attention
    outs = []
    for p in (0.0, 1e-9, 0.4):
        model, draws = drawn(Calls(lambda q, _, p=p: attend(q, k, v, dropout_p=p, **options)))  # type: ignore[misc]
        outs.append(model(q))
        assert draws.counter == (p > 0)
    plain = attend(q, k, v, **options)
    torch.testing.assert_close(outs[0], plain)
    torch.testing.assert_close(outs[1], plain)
    assert not torch.allclose(outs[2], plain, atol=0.1)
    mean = torch.stack([model(q) for _ in range(400)]).mean(dim=0)
    assert (mean - plain).abs().max() < 0.5 * (outs[2] - plain).abs().max()


@pytest.mark.slow
@pytest.mark.usefixtures("timm_ready")
@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("resnet10t", 64, {"drop_rate": 0.3, "drop_path_rate": 0.2}),
        ("efficientnet_b0", 64, {"drop_rate": 0.3, "drop_path_rate": 0.2}),
        ("densenet121", 64, {"drop_rate": 0.3}),
        ("vit_tiny_patch16_224", 32, {"img_size": 32, "drop_rate": 0.1, "attn_drop_rate": 0.2, "drop_path_rate": 0.1}),
        ("resnet10t", 64, {}),
    ],
)
def test_timms_networks_draw_nothing_from_torch(name: str, size: int, options: dict[str, Any]) -> None:
    import timm

    model = timm.create_model(name, num_classes=0, **options).train()
    draws = draw_dropout(model)
    assert (draws is None) == (not options)
    x, before = torch.randn(4, 3, size, size), torch.get_rng_state()
    model(x).sum().backward()
    assert torch.equal(before, torch.get_rng_state())
    assert draws is None or draws.counter > 0


def test_only_a_forward_that_draws_is_changed() -> None:
    class Initialised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(3))
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.dropout(x * self.weight)
            return y

    model = nn.Sequential(Initialised(), nn.RReLU(), nn.Linear(3, 3))
    draw_dropout(model)
    assert [type(module) for module in model][:3] == [Initialised, nn.RReLU, nn.Linear]
    assert type(model[0].dropout) is not nn.Dropout


@pytest.mark.parametrize("name", MODELS.names())
def test_of_the_librarys_networks_only_dropout_layers_are_changed(name: str) -> None:
    if name == "timm":
        pytest.skip("those of another library")
    with torch.device("meta"):
        model = models.build(name, num_classes=3)
    before = {n: type(module) for n, module in model.named_modules()}
    draw_dropout(model)
    changed = {before[n] for n, module in model.named_modules() if n in before and type(module) is not before[n]}
    assert changed <= {nn.Dropout}


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
@pytest.mark.parametrize("mode", ["row", "batch"])
def test_stochastic_depth_of_torchvision(mode: str) -> None:
    try:
        from torchvision.ops import StochasticDepth
    except Exception as error:
        pytest.skip(f"torchvision cannot be imported: {error}")
    model, _ = drawn(StochasticDepth(0.5, mode))
    dropped = {int((model(torch.ones(64, 2)) == 0).all(dim=1).sum()) for _ in range(20)}
    assert dropped == {0, 64} if mode == "batch" else all(10 < count < 54 for count in dropped)


# -- where else it has to hold -----------------------------------------------------------------------------------------
def test_dropout_in_a_checkpointed_part_is_refused() -> None:
    model, _ = drawn(nn.Dropout(0.5))
    y = checkpoint(model, torch.ones(5, requires_grad=True), use_reentrant=False)
    with pytest.raises(FedkeelError, match="gradient checkpointing off"):
        y.sum().backward()


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), Calls(CALLS["dropout"]), Calls(CALLS["bernoulli"])], ids=str)
def test_under_local_privacy_each_sample_has_masks_of_its_own(layer: nn.Module) -> None:
    model = tiny.model()
    model.encoder = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 16), layer)
    model.head = nn.Linear(16, len(tiny.CLASSES))
    draws = draw_dropout(model)
    assert draws is not None
    x, y = torch.ones(6, 3, 8, 8), torch.zeros(6, dtype=torch.int64)
    runs = []
    for _ in range(2):
        draws.begin(torch.Generator().manual_seed(1))
        steps = [sample_gradients(model.train(), x, y)[0]["head.weight"][:, 0] for _ in range(2)]
        runs.append(torch.cat(steps) == 0)
    assert torch.equal(*runs)
    assert len({tuple(mask.tolist()) for mask in runs[0]}) == 12
