"""Which samples make up which batch, decided before training starts.

A plan is a table of sample indices and of uniform random numbers for the augmentation, both made on the CPU
from a generator for (seed, client, round). Training is then a function of the plan alone, whatever the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedkeel import seeds
from fedkeel.core.client import Batch
from fedkeel.data import memory as room
from fedkeel.data.federation import Client, Federation, Transform

log = logging.getLogger("fedkeel")
IMAGES_SHARE = 0.5  # of the GPU's free memory
SAMPLES_AT_ONCE = 64  # gathered and transformed together: more of them no longer fit the cache of a core


@dataclass(frozen=True)
class Plan:
    """`order`: index into the store of each sample, in training order, (n,). `uniforms`: (n, draws).
    `bounds`: start and stop of each batch in both."""

    order: Tensor
    uniforms: Tensor
    bounds: list[tuple[int, int]]

    def to(self, device: torch.device) -> Plan:
        return Plan(self.order.to(device), self.uniforms.to(device), self.bounds)


def training_plan(
    client: Client, transform: Transform, *, seed: int, round: int, epochs: int, batch_size: int, drop_last: bool
) -> Plan:
    """The batches of one client's local training. The last incomplete batch of an epoch is kept by default."""
    generator = seeds.generator(seed, "order", round, client.name)
    orders, bounds, start = [], [], 0
    for _ in range(epochs):
        order = client.train[torch.randperm(client.samples, generator=generator)]
        if drop_last and client.samples >= batch_size:
            order = order[: client.samples - client.samples % batch_size]
        orders.append(order)
        bounds += batch_bounds(len(order), batch_size, start)
        start += len(order)
    uniforms = torch.rand(start, transform.draws, generator=seeds.generator(seed, "augmentation", round, client.name))
    return Plan(torch.cat(orders), uniforms, bounds)


def poisson_plan(client: Client, transform: Transform, stream: seeds.Stream, *, steps: int, rate: float) -> Plan:
    """Batches in each of which every sample is with probability `rate`, whoever else is: some may be empty."""
    chosen = [client.train[stream.uniform(client.samples) < rate] for _ in range(steps)]
    stops = torch.tensor([len(batch) for batch in chosen]).cumsum(0).tolist()
    uniforms = stream.uniform(stops[-1], transform.draws)
    return Plan(torch.cat(chosen), uniforms, list(zip([0, *stops[:-1]], stops, strict=True)))


def batch_bounds(samples: int, batch_size: int, start: int = 0, least: int = 1) -> list[tuple[int, int]]:
    """Start and stop of each batch. A rest of fewer than `least` samples joins the batch before it."""
    bounds = [(start + i, start + min(i + batch_size, samples)) for i in range(0, samples, batch_size)]
    if len(bounds) > 1 and bounds[-1][1] - bounds[-1][0] < least:
        bounds[-2:] = [(bounds[-2][0], bounds[-1][1])]
    return bounds


def refuse_too_large(federation: Federation, *, copied: bool) -> None:
    """Refuse what training will add to the images in memory: a copy, if any, and some of them as floats at a time."""
    images = federation.images
    sets = [max(client.samples, len(client.test)) for client in federation.one_of_each()]
    some = images[: min(SAMPLES_AT_ONCE, max(sets, default=0))].numel()
    what = f"Batches of the images of '{federation.name}', {images.shape[-2]} x {images.shape[-1]} pixels,"
    room.require(some * (1 + 4) + copied * images.numel(), what, "give a smaller size")


class ImageStore:
    """A federation's images and labels on one device; or, where a GPU cannot hold the images, in the host's memory,
    from where chunks of them are streamed to it."""

    def __init__(
        self,
        federation: Federation,
        device: torch.device,
        *,
        channels_last: bool = False,
        streamed: bool | None = None,
    ) -> None:
        """`streamed`: None for what the free memory of the GPU says."""
        self.federation = federation
        self.device = device
        self.streamed = too_large(federation.images, device) if streamed is None else streamed
        if self.streamed:
            log.info("The images stay in the host's memory and are streamed to the GPU, which they would fill.")
        # Batches that come out with channels last need no conversion before the convolutions that want them so.
        self.channels_last = channels_last
        layout = torch.channels_last if channels_last else torch.contiguous_format
        if device.type == "cpu":
            refuse_too_large(federation, copied=channels_last)
        images = federation.images if self.streamed else federation.images.to(device)
        self.images = images.contiguous(memory_format=layout)
        self.labels = federation.labels.to(device)

    def batch(self, indices: Tensor, uniforms: Tensor, transform: Transform) -> Batch:
        """`indices` lie where the images do."""
        if self.streamed:
            shape = (len(indices), *self.images.shape[1:])
            chunk = torch.empty(shape, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            torch.index_select(self.images, 0, indices, out=chunk)
            images = chunk.to(self.device, non_blocking=True)
        else:
            images = self.images[indices]
        uniforms = uniforms.to(self.device, non_blocking=True)
        return Batch(transform(images, uniforms), self.labels[indices.to(self.device, non_blocking=True)])

    def batches(self, plan: Plan, transform: Transform) -> Iterator[Batch]:
        plan = Plan(plan.order.to(self.images.device), plan.uniforms.to(self.device), plan.bounds)
        for bounds in self._together(plan.bounds):
            first, last = bounds[0][0], bounds[-1][1]
            several = self.batch(plan.order[first:last], plan.uniforms[first:last], transform)
            x = several.x.contiguous(memory_format=torch.channels_last) if self.channels_last else several.x
            for start, stop in bounds:
                yield Batch(x[start - first : stop - first], several.y[start - first : stop - first])

    def _together(self, bounds: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """Neighbouring batches that are gathered and transformed in one go: for small ones that takes less time."""
        together: list[tuple[int, int]] = []
        for start, stop in bounds:
            if together and stop - together[0][0] > SAMPLES_AT_ONCE:
                yield together
                together = []
            together.append((start, stop))
        if together:
            yield together

    def in_order(self, indices: Tensor, batch_size: int, transform: Transform, least: int = 1) -> Iterator[Batch]:
        """One pass without randomness, e.g. for evaluation. A transform that draws gets the middle of each range."""
        uniforms = torch.full((len(indices), transform.draws), 0.5)
        bounds = batch_bounds(len(indices), batch_size, least=least)
        yield from self.batches(Plan(indices, uniforms, bounds), transform)


def too_large(images: Tensor, device: torch.device) -> bool:
    """Whether these images would take more of the GPU's free memory than clients can spare."""
    return device.type == "cuda" and images.numel() > IMAGES_SHARE * torch.cuda.mem_get_info(device)[0]


class TrainingPasses:
    """Passes over a client's own data beside the training itself (statistics, prototypes, validation)."""

    def __init__(
        self, store: ImageStore, client: Client, plan: Callable[[], Plan], *, seed: int, round: int, batch_size: int
    ) -> None:
        self._store, self._client, self._plan = store, client, plan
        self._seed, self._round, self._batch_size = seed, round, batch_size

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
        """One pass over the training samples, or over `samples` of them drawn at random, in random order if
        `shuffle`; `by_class`: one class after another, each in the order that it has otherwise. With the training
        transform if `augment`, else with the test transform. A rest of fewer than `least` samples joins the batch
        before it."""
        federation, size = self._store.federation, batch_size or self._batch_size
        indices = self._client.train
        if shuffle or samples is not None:
            generator = seeds.generator(self._seed, "pass", self._round, self._client.name)
            indices = indices[torch.randperm(len(indices), generator=generator)[:samples]]
        if by_class:
            indices = indices[torch.argsort(federation.labels[indices], stable=True)]
        if not augment:
            yield from self._store.in_order(indices, size, federation.test_transform, least)
            return
        transform = federation.train_transform
        generator = seeds.generator(self._seed, "pass augmentation", self._round, self._client.name)
        uniforms = torch.rand(len(indices), transform.draws, generator=generator)
        bounds = batch_bounds(len(indices), size, least=least)
        yield from self._store.batches(Plan(indices, uniforms, bounds), transform)

    def first_batch(self) -> Batch:
        """The batch that this round's training begins with, as training sees it."""
        return next(self._store.batches(self._plan(), self._store.federation.train_transform))

    def validation(self, batch_size: int | None = None) -> Iterator[Batch]:
        """One pass over the validation samples, in order, with the test transform."""
        size = batch_size or self._batch_size
        yield from self._store.in_order(self._client.validation, size, self._store.federation.test_transform)
