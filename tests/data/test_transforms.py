"""Transforms against independent computations."""

from __future__ import annotations

import colorsys
import itertools

import pytest
import torch
import torch.nn.functional as F

from fedkeel.data import TRANSFORMS, Pipeline, parse_transforms
from fedkeel.data.readers.trees import FEDDG_GA
from fedkeel.data.transforms.colour import ColourJitter, Grayscale, Normalise, from_hsv, to_hsv
from fedkeel.data.transforms.geometry import Crop, Flip, Resize, ResizedCrop, Rotation
from fedkeel.errors import FedkeelError


def batch(n: int = 6, height: int = 8, width: int = 8) -> torch.Tensor:
    return torch.rand(n, 3, height, width, generator=torch.Generator().manual_seed(1))


def none(n: int = 6) -> torch.Tensor:
    return torch.empty(n, 0)


def test_a_crop_is_a_slice_of_the_padded_image() -> None:
    x, padding = batch(height=7, width=9), 3
    places = torch.tensor([[0, 0], [6, 6], [3, 3], [1, 5], [5, 0], [2, 6]])
    out = Crop(padding)(x, (places + 0.5) / 7)
    padded = F.pad(x, [padding] * 4)
    for i, (top, left) in enumerate(places.tolist()):
        assert out[i].equal(padded[i, :, top : top + 7, left : left + 9])


def test_a_draw_just_below_one_stays_inside_the_padding() -> None:
    x = batch()
    last = Crop(4)(x, torch.full((6, 2), 1 - 2**-24))
    assert last.equal(F.pad(x, [4] * 4)[:, :, 8:, 8:])


def test_flip_mirrors_those_whose_draw_is_below_p() -> None:
    x = batch()
    u = torch.tensor([0.1, 0.9, 0.49, 0.5, 0.0, 0.7])[:, None]
    out = Flip()(x, u)
    for i, flipped in enumerate([True, False, True, False, True, False]):
        assert out[i].equal(x[i].flip(-1) if flipped else x[i])


def test_rotation_by_a_right_angle_is_rot90() -> None:
    x = batch()
    turned = Rotation(90)(x, torch.tensor([0.0, 1.0, 0.5, 0.0, 1.0, 0.5])[:, None])
    left, right = torch.rot90(x, 1, (2, 3)), torch.rot90(x, -1, (2, 3))
    first = left if torch.allclose(turned[0], left[0], atol=1e-5) else right
    second = right if first is left else left
    torch.testing.assert_close(turned[[0, 3]], first[[0, 3]], atol=1e-5, rtol=0)
    torch.testing.assert_close(turned[[1, 4]], second[[1, 4]], atol=1e-5, rtol=0)
    torch.testing.assert_close(turned[[2, 5]], x[[2, 5]], atol=1e-5, rtol=0)


def test_rotation_keeps_the_shape_of_things_in_images_that_are_not_square() -> None:
    """A bar of 3 x 1 pixels in the middle of a wide image stands upright, as long as before, after a quarter turn."""
    x = torch.zeros(1, 1, 9, 15)
    x[0, 0, 4, 6:9] = 1
    expected = torch.zeros(1, 1, 9, 15)
    expected[0, 0, 3:6, 7] = 1
    torch.testing.assert_close(Rotation(90)(x, torch.zeros(1, 1)), expected, atol=1e-4, rtol=0)


def test_a_resized_crop_of_everything_is_the_image() -> None:
    x = batch()
    same = ResizedCrop(scale=(1.0, 1.0), ratio=(1.0, 1.0))(x, torch.rand(6, 4))
    torch.testing.assert_close(same, x, atol=1e-5, rtol=0)


def test_a_resized_crop_of_a_quarter_is_the_resized_quarter() -> None:
    x = batch()
    u = torch.tensor([0.5, 0.5, 0.0, 1.0]).expand(6, 4)
    out = ResizedCrop(size=4, scale=(0.25, 0.25), ratio=(1.0, 1.0))(x, u)
    # Half the side, all to the left and at the bottom: the pixels of that quarter, unchanged.
    torch.testing.assert_close(out, x[:, :, 4:, :4], atol=1e-5, rtol=0)


def test_normalise_is_minus_mean_over_std() -> None:
    x = batch()
    torch.testing.assert_close(Normalise(0.5, 0.25)(x, none()), (x - 0.5) / 0.25)
    out = Normalise(like="cifar10")(x, none())
    for channel, (mean, std) in enumerate([(0.4914, 0.2023), (0.4822, 0.1994), (0.4465, 0.2010)]):
        torch.testing.assert_close(out[:, channel], (x[:, channel] - mean) / std)


def test_resize_halves_a_plain_image_to_itself() -> None:
    x = torch.full((2, 3, 8, 8), 0.25)
    torch.testing.assert_close(Resize(4)(x, none(2)), torch.full((2, 3, 4, 4), 0.25))
    assert Resize(8)(x, none(2)) is x


def test_grayscale_is_luma_in_three_channels() -> None:
    x = batch(2)
    out = Grayscale(0.5)(x, torch.tensor([[0.4], [0.6]]))
    luma = 0.299 * x[0, 0] + 0.587 * x[0, 1] + 0.114 * x[0, 2]
    for channel in range(3):
        torch.testing.assert_close(out[0, channel], luma)
    assert out[1].equal(x[1])


def test_hue_saturation_and_value_are_those_of_colorsys() -> None:
    x = batch(1, 4, 4)
    x[0, :, 0, 0] = 0.5
    x[0, :, 0, 1] = 0.0
    h, s, v = to_hsv(x)
    for row in range(4):
        for column in range(4):
            expected = colorsys.rgb_to_hsv(*x[0, :, row, column].tolist())
            assert (h[0, row, column].item(), s[0, row, column].item(), v[0, row, column].item()) == pytest.approx(
                expected, abs=1e-5
            )
    torch.testing.assert_close(from_hsv(h, s, v), x, atol=1e-5, rtol=0)


def test_jitter_in_the_middle_of_its_range_changes_nothing() -> None:
    x = batch()
    torch.testing.assert_close(ColourJitter(hue=0.1)(x, torch.full((6, 4), 0.5)), x, atol=1e-5, rtol=0)


def test_each_draw_of_jitter_moves_its_own_quantity() -> None:
    x = batch(1) * 0.5
    middle = torch.full((1, 4), 0.5)

    def with_draw(column: int, value: float) -> torch.Tensor:
        u = middle.clone()
        u[:, column] = value
        return ColourJitter(0.4, 0.4, 0.4, 0.25)(x, u)

    torch.testing.assert_close(with_draw(0, 1.0), x * 1.4)
    assert with_draw(1, 0.0).std() < x.std() < with_draw(1, 1.0).std()
    assert with_draw(2, 0.0).std(1).mean() < x.std(1).mean()
    hue = (to_hsv(with_draw(3, 1.0))[0] - to_hsv(x)[0]) % 1
    torch.testing.assert_close(hue, torch.full_like(hue, 0.25), atol=1e-4, rtol=0)


@pytest.mark.parametrize("hue", [0.1, 0.4, 0.5])
def test_hue_turns_the_colour_wheel_as_colorsys_does(hue: float) -> None:
    """Also of greys, pure colours, black and white, and past both ends of the wheel."""
    corners = torch.tensor(list(itertools.product([0.0, 0.5, 1.0], repeat=3))).T.reshape(1, 3, 3, 9)
    x = torch.cat([corners, batch(5, 3, 9)])
    u = torch.tensor([0.0, 0.2, 0.45, 0.5, 0.8, 1.0])
    out = ColourJitter(0, 0, 0, hue)(x, torch.stack([torch.full_like(u, 0.5)] * 3 + [u], dim=1))
    for sample, row, column in itertools.product(range(6), range(3), range(9)):
        h, s, v = colorsys.rgb_to_hsv(*x[sample, :, row, column].tolist())
        expected = colorsys.hsv_to_rgb((h + hue * (2 * u[sample].item() - 1)) % 1.0, s, v)
        assert out[sample, :, row, column].tolist() == pytest.approx(expected, abs=1e-5)


def test_pacs_is_jittered_by_two_fifths_in_hue_as_well() -> None:
    (jitter,) = (part for part in parse_transforms(FEDDG_GA).transforms if isinstance(part, ColourJitter))
    assert (jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue) == (0.4, 0.4, 0.4, 0.4)


def test_a_pipeline_deals_the_draws_in_order_and_starts_from_bytes() -> None:
    pipeline = parse_transforms("crop(padding=1)+flip+normalise(mean=0.5, std=0.5)")
    assert pipeline == Pipeline((Crop(1), Flip(), Normalise(0.5, 0.5)))
    assert pipeline.draws == 3
    x = torch.randint(0, 256, (2, 3, 5, 5), dtype=torch.uint8)
    out = pipeline(x, torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.9]]))
    expected = (x.float() / 255 - 0.5) / 0.5
    torch.testing.assert_close(out[0], expected[0].flip(-1))
    torch.testing.assert_close(out[1], expected[1])
    assert parse_transforms("")(x, none(2)).equal(x.float() / 255)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMS.names())
def test_every_transform_treats_the_images_of_a_batch_alone(name: str) -> None:
    transform = TRANSFORMS.build(name)
    x, u = batch(), torch.rand(6, transform.draws, generator=torch.Generator().manual_seed(2))
    together = transform(x, u)
    alone = torch.cat([transform(x[i : i + 1], u[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    assert together.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMS.names())
def test_no_transform_asks_the_host_for_a_value(name: str) -> None:
    """Tensors on the meta device have no values: whatever needs one (item, nonzero, a boolean mask) raises there."""
    transform = TRANSFORMS.build(name, **({"hue": 0.1} if name == "jitter" else {}))
    x, u = torch.empty(6, 3, 8, 8, device="meta"), torch.empty(6, transform.draws, device="meta")
    assert transform(x, u).device.type == "meta"
    with pytest.raises((RuntimeError, NotImplementedError)):
        x[u.new_empty(6) > 0.5].sum().item()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("crop(padding=-1)", "The 'padding' of crop is -1"),
        ("flip(p=2)", "The 'p' of flip is 2"),
        ("rotation(degrees=lots)", "The 'degrees' of rotation is 'lots'"),
        ("normalise(std=0)", "must be above 0"),
        ("normalise(mean=a)", "mean in normalise is 'a'"),
        ("normalise(like=mnist)", "no statistics of 'mnist'"),
        ("resized-crop(scale=0.5)", "give 2 numbers in brackets"),
        ("jitter(hue=2)", "The 'hue' of jitter is 2"),
        ("flipp", "did you mean 'flip'"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, message: str) -> None:
    with pytest.raises(FedkeelError, match=message):
        parse_transforms(text)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", TRANSFORMS.names())
def test_every_transform_can_be_captured_in_a_cuda_graph(name: str) -> None:
    transform = TRANSFORMS.build(name)
    x, u = batch().cuda(), torch.rand(6, transform.draws).cuda()
    eager = transform(x, u)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = transform(x, u)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, eager)
    torch.testing.assert_close(captured.cpu(), transform(x.cpu(), u.cpu()), atol=1e-4, rtol=0)
