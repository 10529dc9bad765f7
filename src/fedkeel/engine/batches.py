"""Which samples make up which batch, decided before training starts.

A plan is a table of sample indices and of uniform random numbers for the augmentation, both made on the CPU from a
generator for (seed, client, round). Training is then a function of the plan alone, whatever the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn

from fedkeel import seeds
from fedkeel.core.client import Batch
from fedkeel.data.federation import Client, Federation, Transform

log = logging.getLogger("fedkeel")
IMAGES_SHARE = 0.5  # of the GPU's free memory
SAMPLES_AT_ONCE = 64  # gathered and transformed together: more of them no longer fit the cache of a core
WIDE_CHANNELS = 64  # of a convolution: such a network is large
Bounds = list[tuple[int, int]]  # start and stop of each batch


@dataclass(frozen=True)
class BatchPlan:
    """`order`: index into the store of each sample, in training order, (n,). `uniforms`: (n, draws)."""

    order: Tensor
    uniforms: Tensor
    bounds: Bounds

    @staticmethod
    def of(client: Client, places: Tensor, sizes: Sequence[int], uniforms: Tensor) -> BatchPlan:
        """`places`: of the samples among the client's own; `sizes`: of the batches, some may be empty."""
        stops = list(accumulate(sizes))
        return BatchPlan(client.train[places], uniforms, list(zip([0, *stops], stops, strict=False)))


def batch_bounds(samples: int, batch_size: int, least: int = 1) -> Bounds:
    """A rest of fewer than `least` samples joins the batch before it."""
    bounds = [(i, min(i + batch_size, samples)) for i in range(0, samples, batch_size)]
    if len(bounds) > 1 and bounds[-1][1] - bounds[-1][0] < least:
        bounds[-2:] = [(bounds[-2][0], bounds[-1][1])]
    return bounds


def middle(samples: int, transform: Transform) -> Tensor:
    """For a pass without randomness: a transform that draws gets the middle of each range."""
    return torch.full((samples, transform.draws), 0.5)


def probe(federation: Federation, samples: int = 1, *, training: bool = False) -> Tensor:
    """The first images as the model sees them, to learn their shape or to try it out."""
    transform = federation.train_transform if training else federation.test_transform
    images = federation.images[:samples]
    return transform(images, middle(len(images), transform))


class ImageStore:
    """A federation's images and labels on one device; or, where a GPU cannot hold the images, in the host's memory,
    from where chunks of them are streamed to it. `streamed`: None for what the free memory of the GPU says."""

    def __init__(
        self,
        federation: Federation,
        device: torch.device,
        *,
        channels_last: bool = False,
        streamed: bool | None = None,
    ) -> None:
        self.federation = federation
        self.device = device
        self.streamed = too_large(federation.images, device) if streamed is None else streamed
        if self.streamed:
            log.info("The images stay in the host's memory and are streamed to the GPU, which they would fill.")
        # Batches that come out with channels last need no conversion before the convolutions that want them so.
        self.channels_last = channels_last
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        images = federation.images if self.streamed else federation.images.to(device)
        # What is mapped from a file is not copied into memory: there each batch is laid out.
        mapped = federation.on_disk and images is federation.images
        self.images = images if mapped else images.contiguous(memory_format=self.layout)
        self.labels = federation.labels.to(device)

    def batch(self, indices: Tensor, uniforms: Tensor, transform: Transform) -> Batch:
        """`indices` lie where the images do."""
        images = self._gather(indices)
        if self.streamed:
            images = (images.pin_memory() if self.device.type == "cuda" else images).to(self.device, non_blocking=True)
        uniforms = uniforms.to(self.device, non_blocking=True)
        return Batch(transform(images, uniforms), self.labels[indices.to(self.device, non_blocking=True)])

    def _gather(self, indices: Tensor) -> Tensor:
        """Whole images are copied at once where each lies in one piece; `images[indices]` goes number by number."""
        if self.images.ndim == 4 and self.images.is_contiguous(memory_format=torch.channels_last):
            images = self.images.permute(0, 2, 3, 1).index_select(0, indices).permute(0, 3, 1, 2)
        else:
            images = self.images[indices]
        return images if self.images.ndim < 4 else images.contiguous(memory_format=self.layout)

    def batches(self, plan: BatchPlan, transform: Transform) -> Iterator[Batch]:
        order, uniforms = plan.order.to(self.images.device), plan.uniforms.to(self.device)
        for bounds in neighbours(plan.bounds):
            first, last = bounds[0][0], bounds[-1][1]
            x, y = self.batch(order[first:last], uniforms[first:last], transform)
            if self.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            for start, stop in bounds:
                yield Batch(x[start - first : stop - first], y[start - first : stop - first])

    def in_order(self, indices: Tensor, batch_size: int, transform: Transform, least: int = 1) -> Iterator[Batch]:
        """One pass without randomness, e.g. for evaluation."""
        bounds = batch_bounds(len(indices), batch_size, least)
        yield from self.batches(BatchPlan(indices, middle(len(indices), transform), bounds), transform)


def neighbours(bounds: Bounds) -> Iterator[Bounds]:
    """Batches that are gathered and transformed in one go: for small ones that takes less time."""
    together: Bounds = []
    for start, stop in bounds:
        if together and stop - together[0][0] > SAMPLES_AT_ONCE:
            yield together
            together = []
        together.append((start, stop))
    if together:
        yield together


def too_large(images: Tensor, device: torch.device) -> bool:
    """Whether these images would take more of the GPU's free memory than clients can spare."""
    return device.type == "cuda" and images.nbytes > IMAGES_SHARE * torch.cuda.mem_get_info(device)[0]


def try_channels_last(model: nn.Module, federation: Federation, device: torch.device, half: bool) -> bool:
    """Lay a model, which is on that device, out with channels last where that is faster and its forward allows it.

    CPUs pool and convolve faster so, and tensor cores want it: otherwise the GPU converts every activation back
    and forth. Small networks on a GPU run on other kernels and do not gain.
    """
    widest = max((m.in_channels // m.groups for m in model.modules() if isinstance(m, nn.Conv2d)), default=0)
    if not widest or (device.type == "cuda" and not half and widest < WIDE_CHANNELS):
        return False
    images = probe(federation)
    if images.ndim != 4:
        return False
    images = images.expand(2, -1, -1, -1).to(device)
    training = model.training
    try:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        with torch.no_grad():
            model.eval()(images.contiguous(memory_format=torch.channels_last))
    except RuntimeError:  # e.g. a `view` that only fits the other layout
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        return False
    finally:
        model.train(training)
    return True


@dataclass(frozen=True)
class TrainingPasses:
    """The `LocalData` of a client: passes beside the training itself (statistics, prototypes, validation)."""

    store: ImageStore
    client: Client
    plan: Callable[[], BatchPlan]
    seed: int
    round: int
    batch_size: int

    def passes(
        self,
        batch_size: int | None = None,
        *,
        augment: bool = False,
        samples: int | None = None,
        shuffle: bool = False,
        by_class: bool = False,
        least: int = 1,
    ) -> Iterator[Batch]:
        """With the training transform if `augment`, else with the test transform."""
        federation, size = self.store.federation, batch_size or self.batch_size
        indices = self.client.train
        if shuffle or samples is not None:
            generator = seeds.generator(self.seed, "pass", self.round, self.client.name)
            indices = indices[torch.randperm(len(indices), generator=generator)[:samples]]
        if by_class:
            indices = indices[torch.argsort(federation.labels[indices], stable=True)]
        if not augment:
            yield from self.store.in_order(indices, size, federation.test_transform, least)
            return
        transform = federation.train_transform
        generator = seeds.generator(self.seed, "pass augmentation", self.round, self.client.name)
        uniforms = torch.rand(len(indices), transform.draws, generator=generator)
        plan = BatchPlan(indices, uniforms, batch_bounds(len(indices), size, least))
        yield from self.store.batches(plan, transform)

    def first_batch(self) -> Batch:
        return next(self.store.batches(self.plan(), self.store.federation.train_transform))

    def validation(self, batch_size: int | None = None) -> Iterator[Batch]:
        size = batch_size or self.batch_size
        yield from self.store.in_order(self.client.validation, size, self.store.federation.test_transform)
