from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fedkeel.config import Config
from fedkeel.engine.batches import BatchPlan, ImageStore, TrainingPasses, batch_bounds, too_large
from fedkeel.trust.rules import PlainGradients
from tests import tiny, vectors

FEDERATION = tiny.federation()
CLIENT = FEDERATION["ward"]  # 14 samples


def plan(round: int = 0, epochs: int = 1, **changes: Any) -> BatchPlan:
    rule = PlainGradients(Config(**{"local_epochs": epochs, "batch_size": 4, **changes}))
    return BatchPlan.of(CLIENT, *rule.batches("ward", round, CLIENT.samples, FEDERATION.train_transform.draws))


def sizes(plan: BatchPlan) -> list[int]:
    return [stop - start for start, stop in plan.bounds]


def test_the_last_incomplete_batch_is_kept_unless_it_is_dropped() -> None:
    assert sizes(plan()) == [4, 4, 4, 2]
    assert sizes(plan(drop_last=True)) == [4, 4, 4]
    assert sizes(plan(epochs=2)) == [4, 4, 4, 2, 4, 4, 4, 2]
    assert sizes(plan(epochs=2, drop_last=True)) == [4, 4, 4, 4, 4, 4]


def test_a_client_smaller_than_a_batch_still_trains() -> None:
    assert sizes(plan(batch_size=32, drop_last=True)) == [14]


def test_each_epoch_sees_every_sample_once_in_a_new_order() -> None:
    order = plan(epochs=2).order
    for epoch in (order[:14], order[14:]):
        assert sorted(epoch.tolist()) == CLIENT.train.tolist()
    assert not torch.equal(order[:14], order[14:])


def test_plans_repeat_by_seed_round_and_client_and_differ_otherwise() -> None:
    assert torch.equal(plan().order, plan().order)
    assert torch.equal(plan().uniforms, plan().uniforms)
    assert not torch.equal(plan().order, plan(round=1).order)
    assert not torch.equal(plan().uniforms, plan(seed=1).uniforms)


def test_the_order_of_samples_does_not_depend_on_the_batch_size() -> None:
    assert torch.equal(plan(batch_size=3).order, plan(batch_size=7).order)


@pytest.mark.parametrize(("samples", "size"), [(1, 1), (10, 3), (9, 3), (2, 5)])
def test_bounds_cover_everything_without_gaps(samples: int, size: int) -> None:
    bounds = batch_bounds(samples, size)
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(samples))


def passes(round: int = 0) -> TrainingPasses:
    store = ImageStore(FEDERATION, torch.device("cpu"))
    return TrainingPasses(store, CLIENT, lambda: plan(round=round, epochs=2), seed=0, round=round, batch_size=4)


def test_a_pass_sees_every_sample_and_so_every_class() -> None:
    batches = list(passes().passes())
    assert [len(batch.y) for batch in batches] == [4, 4, 4, 2]
    assert torch.equal(torch.cat([batch.y for batch in batches]), FEDERATION.labels[CLIENT.train])
    assert torch.equal(torch.cat([batch.x for batch in batches]), FEDERATION.images[CLIENT.train] / 255)


def test_a_pass_over_some_samples_draws_them_at_random() -> None:
    def seen(round: int) -> list[int]:
        x = torch.cat([batch.x for batch in passes(round).passes(samples=6)])
        everything = FEDERATION.images / 255
        return [int((everything == image).flatten(1).all(1).nonzero()[0]) for image in x]

    assert len(set(seen(0))) == 6
    assert set(seen(0)) <= set(CLIENT.train.tolist())
    assert seen(0) == seen(0)
    assert seen(0) != seen(1)


def test_a_pass_over_the_validation_samples_sees_them_and_no_others() -> None:
    batches = list(passes().validation(3))
    assert [len(batch.y) for batch in batches] == [3, 1]
    assert torch.equal(torch.cat([batch.x for batch in batches]), FEDERATION.images[CLIENT.validation] / 255)
    assert torch.equal(torch.cat([batch.y for batch in batches]), FEDERATION.labels[CLIENT.validation])


def test_a_pass_may_shuffle_and_augment() -> None:
    shuffled = torch.cat([batch.y for batch in passes().passes(shuffle=True)])
    assert sorted(shuffled.tolist()) == sorted(FEDERATION.labels[CLIENT.train].tolist())
    assert not torch.equal(shuffled, FEDERATION.labels[CLIENT.train])
    plain, augmented = (torch.cat([b.x for b in passes().passes(augment=a)]) for a in (False, True))
    flipped = [torch.equal(a, p.flip(-1)) for a, p in zip(augmented, plain, strict=True)]
    kept = [torch.equal(a, p) for a, p in zip(augmented, plain, strict=True)]
    assert any(flipped)
    assert any(kept)
    assert all(f or k for f, k in zip(flipped, kept, strict=True))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_pass_by_class_begins_with_the_lowest_and_keeps_the_order_inside(shuffle: bool) -> None:
    plain, ordered = (
        [
            image
            for batch in passes().passes(shuffle=shuffle, by_class=b)
            for image in zip(batch.x, batch.y, strict=True)
        ]
        for b in (False, True)
    )
    wanted = sorted(plain, key=lambda image: int(image[1]))  # as stable as it says
    assert [int(y) for _, y in ordered] == [int(y) for _, y in wanted]
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(ordered, wanted, strict=True))
    assert [int(y) for _, y in plain] != [int(y) for _, y in wanted]


def test_the_first_batch_is_the_one_that_training_begins_with() -> None:
    worker = tiny.setup(local_epochs=3).worker
    client = worker.begin("ward", tiny.broadcast(worker, 2), {})
    first = next(iter(worker.store.batches(worker.plan("ward", 2), FEDERATION.train_transform)))
    given = client.data.first_batch()
    assert torch.equal(given.x, first.x)
    assert torch.equal(given.y, first.y)
    assert not torch.equal(given.x, passes(1).first_batch().x)


def test_streamed_images_make_the_same_batches() -> None:
    on = tiny.federation()
    drawn = plan(round=1, epochs=2)
    stores = [ImageStore(on, torch.device("cpu"), streamed=streamed) for streamed in (False, True)]
    batches = [list(store.batches(drawn, on.train_transform)) for store in stores]
    assert len(batches[0]) == len(drawn.bounds)
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.y, other.y)


class Look:
    """Gives the images as it gets them."""

    draws = 0

    def __call__(self, x: Tensor, u: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("streamed", [False, True])
def test_images_on_disk_are_not_copied_and_make_the_same_batches(streamed: bool) -> None:
    held = tiny.federation()
    mapped = replace(held, on_disk=True)
    drawn, device = plan(round=1, epochs=2), torch.device("cpu")
    for last in (False, True):
        stores = [ImageStore(on, device, channels_last=last, streamed=streamed) for on in (held, mapped)]
        assert stores[1].images is mapped.images
        batches = [list(store.batches(drawn, held.train_transform)) for store in stores]
        for one, other in zip(*batches, strict=True):
            assert torch.equal(one.x, other.x)
        # Transforms see the same layout, by which sums over pixels may differ in their last bits.
        seen = [store.batch(CLIENT.train, torch.empty(14, 0), Look()).x for store in stores]
        assert seen[0].stride() == seen[1].stride()


def test_streamed_floats_stay_floats() -> None:
    on = vectors.federation()
    stores = [ImageStore(on, torch.device("cpu"), streamed=streamed) for streamed in (False, True)]
    batches = [list(store.in_order(on["north"].train, 8, on.test_transform)) for store in stores]
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one.x, other.x)
    assert torch.equal(torch.cat([x for x, _ in batches[1]]), on.images[on["north"].train])


def test_images_beyond_half_of_the_free_memory_of_a_gpu_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    images = vectors.federation().images
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * images.nbytes - 1, 0))
    assert too_large(images, torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * images.nbytes, 0))
    assert not too_large(images, torch.device("cuda"))


@pytest.mark.parametrize(
    ("samples", "sizes"), [(128, [64, 64]), (159, [64, 95]), (160, [64, 64, 32]), (31, [31]), (65, [65])]
)
def test_a_small_rest_joins_the_batch_before_it(samples: int, sizes: list[int]) -> None:
    bounds = batch_bounds(samples, 64, least=32)
    assert [stop - start for start, stop in bounds] == sizes
    assert [start for start, _ in bounds] == [0, *(stop for _, stop in bounds[:-1])]
