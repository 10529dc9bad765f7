"""Layers with their kernels against the same layers without, in values and in gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedkeel.errors import FedkeelError
from fedkeel.nn import HybridBatchNorm, ScaledWSConv2d, kernels
from fedkeel.nn.kernels import norms, weights
from tests.nn.kernels.conftest import GPU

INTERPRETED = ("2d", "4d", "5d")  # where each program takes Python's time

CONVOLUTIONS: dict[str, Callable[[], Any]] = {
    "1x1": lambda: ScaledWSConv2d(24, 40, 1),
    "1x1 of three": lambda: ScaledWSConv2d(3, 5, 1, bias=False),
    "3x3": lambda: ScaledWSConv2d(16, 33, 3, padding=1),
    "wide 3x3": lambda: ScaledWSConv2d(512, 64, 3, padding=1),
    "7x7": lambda: ScaledWSConv2d(3, 64, 7, stride=2, padding=3, bias=False),
    "depth-wise": lambda: ScaledWSConv2d(32, 32, 3, groups=32),
    "grouped": lambda: ScaledWSConv2d(32, 64, (1, 5), groups=4),
    "one row": lambda: ScaledWSConv2d(7, 1, 3),
}
SHAPES = {
    "2d": (16, 10),
    "4d": (8, 36, 5, 7),
    "4d large": (16, 64, 14, 14),
    "4d wide": (4, 515, 7, 7),
    "5d": (2, 6, 3, 4, 5),
}


def close(one: Tensor | None, other: Tensor | None, tolerance: float = 1e-5, what: str = "") -> None:
    """Relative to the entry, or to the tensor's largest one."""
    assert (one is None) == (other is None), what
    if one is None or other is None:
        return
    assert one.dtype == other.dtype, what
    assert one.isfinite().all(), what
    largest = float(other.detach().abs().max())
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * max(largest, 1e-30), msg=lambda m: what + m)


def standardised(convolution: Any, dy: Tensor) -> list[Tensor]:
    convolution.zero_grad()
    weight = convolution.standardised_weight()
    weight.backward(dy)
    return [weight.detach(), convolution.weight.grad, convolution.gain.grad]


@pytest.mark.parametrize("name", list(CONVOLUTIONS))
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("clamped", [False, True], ids=["free", "clamped"])
@pytest.mark.slow
def test_standardised_weights(device: torch.device, name: str, last: bool, clamped: bool, plainly: Any) -> None:
    torch.manual_seed(3)
    convolution = CONVOLUTIONS[name]().to(device)
    nn.init.normal_(convolution.gain)
    with torch.no_grad():
        if clamped:  # every second row has a variance far below the floor
            convolution.weight[::2] *= 1e-4
    if last:
        if convolution.weight.ndim not in norms.FORMATS:
            pytest.skip("there is no such layout")
        convolution.to(memory_format=norms.FORMATS[convolution.weight.ndim])
    assert weights.can_standardise(convolution.weight, convolution.gain)
    for layout in (torch.preserve_format, torch.contiguous_format):  # the gradient may come in another layout
        dy = torch.randn_like(convolution.weight, memory_format=layout)
        expected = plainly(lambda dy=dy: standardised(convolution, dy))
        expected = [tensor.clone() for tensor in expected]
        actual = standardised(convolution, dy)
        for one, other, what in zip(actual, expected, ("value", "weight", "gain"), strict=True):
            close(one, other, what=what)
        like = (convolution.weight, convolution.weight, convolution.gain)  # also where a size of 1 leaves a choice
        assert [tensor.stride() for tensor in actual] == [tensor.stride() for tensor in like]


@pytest.mark.parametrize("clamped", [False, True], ids=["free", "clamped"])
def test_gradients_of_standardisation_against_float64(device: torch.device, clamped: bool) -> None:
    torch.manual_seed(4)
    convolution = ScaledWSConv2d(8, 16, 3).to(device)
    nn.init.normal_(convolution.gain)
    if clamped:
        with torch.no_grad():
            convolution.weight.mul_(1e-3)
    exact = copy.deepcopy(convolution).double()
    dy = torch.randn_like(convolution.weight)
    for one, other in zip(standardised(convolution, dy), standardised(exact, dy.double()), strict=True):
        close(one, other.float())


def test_a_fan_in_of_one_keeps_its_rule_and_float64_its_code(device: torch.device) -> None:
    convolution = ScaledWSConv2d(8, 8, 1, groups=8).to(device)
    assert not weights.can_standardise(convolution.weight, convolution.gain)
    torch.testing.assert_close(convolution.standardised_weight(), convolution.weight)
    wide = ScaledWSConv2d(8, 8, 3).to(device).double()
    assert not weights.can_standardise(wide.weight, wide.gain)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)], indirect=True)
def test_under_autocast_the_weight_is_rounded_once(device: torch.device, plainly: Any) -> None:
    torch.manual_seed(5)
    convolution = ScaledWSConv2d(16, 32, 3).to(device).to(memory_format=torch.channels_last)
    x = torch.randn(4, 16, 9, 9, device=device).to(memory_format=torch.channels_last)

    def run() -> list[Tensor]:
        convolution.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = convolution(x)
        y.float().square().mean().backward()
        return [y.detach().float(), convolution.weight.grad.clone(), convolution.gain.grad.clone()]

    for one, other in zip(run(), plainly(run), strict=True):
        close(one, other, 0.02)  # a rounding that falls the other way is a bfloat16 step


def hybrid(shape: tuple[int, ...], device: torch.device, **options: Any) -> HybridBatchNorm:
    layer = HybridBatchNorm(shape[1], **options).to(device)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))
        layer.running_mean.normal_()
        layer.running_var.uniform_(0.5, 1.5)
    return layer


def normalised(layer: HybridBatchNorm, x: Tensor, dy: Tensor) -> dict[str, Tensor | None]:
    layer.zero_grad()
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad} | {name: parameter.grad for name, parameter in layer.named_parameters()}


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("mix", ["learned", "fixed", "global", "batch"])
def test_hybrid_normalisation(device: torch.device, shape: str, affine: bool, mix: str, plainly: Any) -> None:
    if device.type == "cpu" and shape not in INTERPRETED:
        pytest.skip("for a GPU")
    torch.manual_seed(6)
    size = SHAPES[shape]
    layer = hybrid(size, device, affine=affine, mix=mix)
    x, dy = torch.randn(size, device=device) * 2 + 1, torch.randn(size, device=device)
    if len(size) in norms.FORMATS:
        x = x.contiguous(memory_format=norms.FORMATS[len(size)])
    assert norms.takes("hybrid", x, layer.alpha, layer.weight, layer.bias)
    fast = normalised(layer, x, dy)
    slow = plainly(lambda: normalised(layer, x, dy))
    assert fast.keys() == slow.keys()
    for name in slow:
        close(fast[name], slow[name], what=name)
    assert fast["y"].stride() == slow["y"].stride()  # type: ignore[union-attr]


@pytest.mark.parametrize("shape", [(6, 7, 33), (4, 5, 3, 3)], ids=str)
def test_other_layouts_are_left_to_pytorch(device: torch.device, shape: tuple[int, ...]) -> None:
    layer = hybrid(shape, device)
    x = torch.randn(shape, device=device)
    assert not norms.takes("hybrid", x, layer.alpha)
    exact = normalised(copy.deepcopy(layer).double(), x.double(), torch.ones_like(x).double())
    for name, tensor in normalised(layer, x, torch.ones_like(x)).items():
        close(tensor, None if exact[name] is None else exact[name].float(), 1e-4, name)  # type: ignore[union-attr]


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hybrid_normalisation_of_half_precision(device: torch.device, dtype: torch.dtype, plainly: Any) -> None:
    torch.manual_seed(7)
    layer = hybrid((8, 48, 9, 9), device)
    x = torch.randn(8, 48, 9, 9, device=device, dtype=dtype).to(memory_format=torch.channels_last)
    dy = torch.randn_like(x)
    fast, slow = normalised(layer, x, dy), plainly(lambda: normalised(layer, x, dy))
    for name in slow:
        close(fast[name], slow[name], 0.01 if name in ("x", "y") else 1e-5, name)


@pytest.mark.parametrize("momentum", [None, 0.1])
@pytest.mark.parametrize("what", ["mixture", "batch"])
@pytest.mark.parametrize("mix", ["learned", "global"])
def test_what_is_recorded(device: torch.device, mix: str, what: str, momentum: float | None, plainly: Any) -> None:
    torch.manual_seed(8)
    layer = hybrid((8, 130), device, mix=mix)
    batches = [torch.randn(n, 130, device=device) * n for n in (2, 8, 5)]

    def record() -> tuple[Tensor, ...]:
        layer.start_recording(what, momentum)
        with torch.no_grad():
            for x in batches:
                layer(x)
        return layer.recorded()

    recorded = record()
    for one, other in zip(recorded, plainly(record), strict=True):
        close(one, other)
    assert int(recorded[2]) == 15


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=GPU)], indirect=True)
def test_under_capture(device: torch.device, plainly: Any) -> None:
    torch.manual_seed(9)
    convolution = ScaledWSConv2d(3, 16, 3)
    first = nn.Sequential(convolution, HybridBatchNorm(16), nn.ReLU(inplace=True), ScaledWSConv2d(16, 4, 1))
    first = first.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    other = copy.deepcopy(first)
    x = torch.randn(8, 3, 10, 10, device=device).to(memory_format=torch.channels_last)

    def stepper(model: nn.Sequential) -> Callable[[], None]:
        model[1].start_recording("batch")

        def step() -> None:
            model.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(0.05 * parameter.grad)

        return step

    previous = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        step = stepper(first)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(3):
            graph.replay()
        eager = stepper(other)
        plainly(lambda: [eager() for _ in range(4)])
    finally:
        torch.backends.cudnn.allow_tf32 = previous
    for (name, one), two in zip(first.named_parameters(), other.parameters(), strict=True):
        close(one.detach(), two.detach(), what=name)
    for one, two in zip(first[1].recorded(), other[1].recorded(), strict=True):
        close(one, two)


def test_a_switch_takes_known_names_only() -> None:
    with kernels.without("hybrid"):
        assert not kernels.is_on("hybrid")
        assert kernels.is_on("paired")
        with kernels.without("hybrid", "paired"):
            assert not kernels.is_on("paired")
        assert not kernels.is_on("hybrid")
    assert kernels.is_on("hybrid")
    with pytest.raises(FedkeelError, match="no kernel 'hybird': did you mean 'hybrid'"), kernels.without("hybird"):
        pass
