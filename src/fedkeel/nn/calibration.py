"""Give a network's normalisation the statistics of a site, mixed with the federation's, from images without labels.

First the site is looked at through the network as it is: what it says of the images, and how far each layer's means are
from the federation's. That decides the share of the site's own statistics (`fedkeel.formulas.calibration`). Then layer
after layer gets, with the layers before it calibrated already,

    mean = (1 - share) global + share site,    variance likewise

So neither the order of the images nor the size of a batch matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedkeel.config import Config
from fedkeel.core.client import Batch
from fedkeel.core.readable import short
from fedkeel.core.state import moment_names
from fedkeel.errors import FedkeelError
from fedkeel.formulas.calibration import class_mix, explained_distance, look, site_share, squared_distance

PRIOR = Config.site_prior  # images that the federation's statistics are worth
EXPECTED = "expects_statistics"  # an attribute of a network


def normalised_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every layer with a running mean and variance, batch norm and HBN's, in the network's order.

    >>> list(normalised_layers(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
    ['1']
    """
    return {
        name: module
        for name, module in model.named_modules()
        if all(getattr(module, buffer, None) is not None for buffer in moment_names(""))
    }


def expect_statistics(model: nn.Module) -> None:
    """Have calibrations leave this model's statistics alone, as its weights are trained under the federation's: for the
    `prepare` of a method that does so.

    >>> model = nn.Sequential(nn.BatchNorm1d(2))
    >>> expect_statistics(model)
    >>> Calibrator(model, model).expected
    True
    """
    setattr(model, EXPECTED, True)


def channel_sums(x: Tensor) -> Tensor:
    """Number, sum and sum of squares of each channel's values, (3, C), in double precision; x is (N, C, ...).

    >>> channel_sums(torch.tensor([[1.0], [3.0]])).flatten().tolist()
    [2.0, 4.0, 10.0]
    """
    wide = x.detach().double().transpose(0, 1).flatten(1)
    return torch.stack([wide.new_full((len(wide),), wide.shape[1]), wide.sum(1), wide.square().sum(1)])


def moments_of(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel, of `channel_sums`."""
    count, total, squares = sums
    mean = total / count
    return mean, (squares / count - mean.square()).clamp_min(0)


@dataclass(frozen=True)
class Calibration:
    """What was seen of a site's images, and what came of it; made by `fedkeel.calibrate`, which has an example.

    Attributes:
        images: how many were looked at.
        prior: how many images the federation's statistics are worth.
        distance: of the site from the federation: the squared distance of the first two moments of normalised values,
            in units of the variance of single images, on average over both and all layers.
        explained: what the class mix and chance explain of it.
        trust: the share of the distance that is the images' look.
        share: of the site's statistics in the mixture; 0 is the model as it was.
        mix: the shares of the classes, as the model takes them to be.
        layers: the distance by layer.
        expected: the network was trained under the federation's statistics, and keeps them.
    """

    images: int
    prior: float
    distance: float
    explained: float
    trust: float
    share: float
    mix: Sequence[float]
    layers: dict[str, float]
    expected: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> Iterator[str]:
        """For a person: how far the site is, and what is expected of the calibration."""
        if self.images < 2:
            yield f"{self.images} samples do not tell how far the site is: {100 * self.share:.0f} % of it is taken."
            return
        yield (
            f"The site's moments are {short(self.distance)} from the federation's (squared, in units of what single "
            f"samples differ by); its class mix and their number explain a distance of {short(self.explained)}."
        )
        if self.share:
            yield (
                f"So {100 * self.trust:.0f} % is taken for their look, and with {self.images:,} samples against a "
                f"prior of {self.prior:g} the statistics are {100 * self.share:.0f} % its own."
            )
        elif self.expected:
            yield "But its weights were trained under the federation's statistics and expect them: it is as it was."
        else:
            yield "So nothing says that its samples look different: the model is as it was."


class _Reached(Exception):
    """The layer that is measured has its input."""


class Calibrator:
    """Calibrates one network, for one site after another: whoever uses it loads the statistics anew in between.

    >>> model = nn.Sequential(nn.BatchNorm1d(2)).eval()
    >>> x = torch.tensor([[9.0, 1.0], [1.0, 9.0]]).repeat(8, 1)
    >>> record = Calibrator(model, model).calibrate(lambda: [Batch(x, torch.zeros(16))], always=True)
    >>> record.share, model[0].running_mean.tolist()
    (0.5, [2.5, 2.5])
    """

    def __init__(self, model: nn.Module, logits: Callable[[Tensor], Tensor]) -> None:
        """`logits`: of a batch, through this model."""
        self.layers, self.logits = normalised_layers(model), logits
        self.expected = bool(getattr(model, EXPECTED, False))

    @torch.no_grad()
    def calibrate(
        self, batches: Callable[[], Iterable[Batch]], prior: float = PRIOR, *, always: bool = False
    ) -> Calibration:
        """Change the statistics of the model, which is in evaluation mode, in place. One that was trained under the
        federation's (`expect_statistics`) is left as it is, unless `always`.

        Args:
            batches: the site's images, the same each time it is called; labels are not looked at.
            prior: how many images the federation's statistics are worth.
            always: take the whole distance for the look of the images, whatever the class mix.
        """
        images = sum(len(batch.x) for batch in batches())
        if not images:
            return Calibration(0, prior, 0.0, 0.0, 0.0, 0.0, (), {})
        distances, chances = self._look(batches, images)
        found = class_mix(chances)
        distance = sum(distances.values()) / len(distances) if distances else 0.0
        explained = explained_distance(found, images)
        # The spread of single images is not known of one.
        known = images > 1 and not self.expected
        trust = 1.0 if always else look(distance, explained) if known else 0.0
        share = site_share(trust, images, prior)
        for name in distances if share > 0 else ():
            self._settle(name, batches, share)
        seen = (distance, explained, trust, share, tuple(found.tolist()), distances)
        return Calibration(images, prior, *seen, expected=self.expected)

    def _look(self, batches: Callable[[], Iterable[Batch]], images: int) -> tuple[dict[str, float], Tensor]:
        """Of each layer that is reached, in this order, the distance; of each image, what the network says."""
        sums: dict[str, list[Tensor]] = {}
        chances: list[Tensor] = []

        def add(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen = [channel_sums(of_images) for of_images in _image_moments(inputs[0], layer)]
            sums[name] = [old + new for old, new in zip(sums[name], seen, strict=True)] if name in sums else seen

        with self._hooked(self.layers, add):
            for batch in batches():
                chances.append(self.logits(batch.x).double().softmax(1))
        distances = {}
        unbiased = images / max(images - 1, 1)
        for name, both in sums.items():
            moments = zip(map(moments_of, both), (0.0, 1.0), strict=True)
            squared = [squared_distance(mean, unbiased * var, usual) for (mean, var), usual in moments]
            distances[name] = float(squared[0] + squared[1]) / 2
        return distances, torch.cat(chances).cpu()

    def _settle(self, name: str, batches: Callable[[], Iterable[Batch]], share: float) -> None:
        """Give this layer its mixture; those before it have theirs."""
        sums = []

        def measure(_: str, __: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            sums.append(channel_sums(inputs[0]))
            raise _Reached  # what comes after it need not be computed

        with self._hooked([name], measure):
            for batch in batches():
                with suppress(_Reached):
                    self.logits(batch.x)
        for buffer, moment in zip(moment_names(""), moments_of(torch.stack(sums).sum(dim=0)), strict=True):
            tensor = self.layers[name].get_buffer(buffer)
            # In double precision: mixed with itself, a number stays what it is.
            tensor.copy_(tensor.double().lerp(moment, share))

    @contextmanager
    def _hooked(self, names: Iterable[str], hook: Callable[..., None]) -> Iterator[None]:
        with ExitStack() as hooks:
            for name in names:
                hooks.enter_context(self.layers[name].register_forward_pre_hook(partial(hook, name)))
            yield


def _image_moments(x: Tensor, layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Of each image and channel, the mean and the mean square of normalised values, (N, C) each."""
    mean, var = (layer.get_buffer(buffer).double()[:, None] for buffer in moment_names(""))
    values = x.detach().double().flatten(2) if x.ndim > 2 else x.detach().double()[..., None]
    normal = (values - mean) / (var + float(getattr(layer, "eps", 0.0))).sqrt()
    return normal.mean(2), normal.square().mean(2)


def refuse_without_statistics(model: nn.Module, what: str) -> None:
    if not normalised_layers(model):
        raise FedkeelError(
            f"{what} has no layer with running statistics, so there is nothing to calibrate: use it as it is."
        )
