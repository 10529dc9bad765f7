from __future__ import annotations

import torch

from fedkeel import seeds


def test_each_purpose_has_numbers_of_its_own() -> None:
    purposes = [
        (0, "order", 0, "a"),
        (1, "order", 0, "a"),
        (0, "order", 1, "a"),
        (0, "order", 0, "b"),
        (0, "aug", 0, "a"),
    ]
    assert len({seeds.derive(*purpose) for purpose in purposes}) == len(purposes)
    assert seeds.derive(0, "ab", "c") != seeds.derive(0, "a", "bc")


def test_the_numbers_are_the_same_on_every_machine_and_in_every_version() -> None:
    # Frozen on purpose: a run that was begun with another release must resume with the same choices.
    assert seeds.derive(7, "order", 3, "ward") == 1780462869782316896


def test_a_seed_fits_every_generator() -> None:
    assert all(0 <= seeds.derive(0, i) < 2**63 for i in range(1000))


def test_generators_repeat() -> None:
    assert torch.equal(
        torch.rand(4, generator=seeds.generator(1, "x")), torch.rand(4, generator=seeds.generator(1, "x"))
    )
    assert (seeds.numpy_generator(1, "x").random(4) == seeds.numpy_generator(1, "x").random(4)).all()


def test_a_sample_is_of_different_numbers_and_repeats() -> None:
    first, again = (seeds.sample(1000, 17, seeds.generator(3, "x")) for _ in range(2))
    assert first == again
    assert len(set(first)) == 17
    assert set(first) <= set(range(1000))


def test_the_default_generator_is_put_back() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with seeds.default_generator(0, "model"):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with seeds.default_generator(0, "model"):
        assert torch.equal(torch.rand(3), inside)
