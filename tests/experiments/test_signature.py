"""A signature changes with what a method computes, and with nothing else."""

import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.types import Output
from fedkeel.experiments import signature as probes
from fedkeel.experiments.recipes import load, names
from fedkeel.experiments.signature import same, signature
from fedkeel.methods.fedprox import FedProx
from fedkeel.models.cnn import SimpleCNN
from fedkeel.stopping import stop_requested


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """What is computed here, with methods and networks that are not as they are, is computed anew elsewhere."""
    yield
    probes._of.cache_clear()


def losses(method: str) -> tuple[float | None, ...]:
    """Computed anew."""
    probes._of.cache_clear()
    return probes._of(probes._losses, method, 8)


def test_a_method_is_told_from_another_and_known_again() -> None:
    first = losses("fedprox(mu=0.01)")
    assert losses("fedprox(mu=0.01)") == first
    assert not same(first, losses("fedprox(mu=0.011)"))
    assert not same(first, first[:-1])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("fedwon", "fedwon(agc=false)"),
        ("fedwon(clipping=0.64)", "fedwon(clipping=1.28)"),
        ("hbn(variant=released)", "hbn(momentum=0.002)"),
        ("hbn(warm_start=false)", "hbn(record=batch, warm_start=false)"),
        ("ga(step_size=0.05)", "fedavg"),
        ("fixbn", "fedavg"),
    ],
)
@pytest.mark.slow
def test_what_options_change_is_seen(one: str, other: str) -> None:
    assert not same(losses(one), losses(other))


def test_what_a_method_computes_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before, loss = losses("fedprox(mu=0.5)"), FedProx.loss

    def a_little_more(self: FedProx, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        return 1.01 * loss(self, client, batch, output)

    monkeypatch.setattr(FedProx, "loss", a_little_more)
    assert not same(before, losses("fedprox(mu=0.5)"))


@pytest.mark.slow
def test_what_the_released_pass_of_hbn_looks_at_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = losses("hbn(variant=released)")
    monkeypatch.setattr("fedkeel.methods.hbn_released.islice", lambda batches, _: batches)  # all, not 64
    assert not same(before, losses("hbn(variant=released)"))


def test_what_a_network_computes_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    probes._of.cache_clear()
    before = signature("fedavg", "simple_cnn")
    assert len(before) == 10
    assert not same(before, signature("fedavg", "simple_cnn(width=8)"))
    probes._of.cache_clear()
    extract = SimpleCNN.extract
    monkeypatch.setattr(SimpleCNN, "extract", lambda self, x: torch.tanh(extract(self, x)))
    assert not same(before, signature("fedavg", "simple_cnn"))
    probes._of.cache_clear()


def test_it_leaves_everything_as_it_was() -> None:
    before, threads = losses("fedavg"), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    stop_requested.set()  # runs are being stopped: no reason to stop here, nor to forget about it
    try:
        assert losses("fedavg") == before
        assert stop_requested.is_set()
        assert torch.get_num_threads() == threads + 1
    finally:
        stop_requested.clear()
        torch.set_num_threads(threads)
    assert torch.get_default_dtype() is torch.float32


def test_what_is_not_known_is_not_held_against_it() -> None:
    assert same((1.0, None), (1.0, 2.0))
    assert not same((1.0, None), (1.1, 2.0))
    assert not same((), ())


def test_a_method_that_the_small_problem_does_not_suit_is_not_known() -> None:
    assert losses("fedwon(skip=encoder.conv9)") == (None,) * 8


def test_a_full_disk_says_nothing_of_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(probes, "simulate", full)
    with pytest.raises(OSError, match="No space"):
        losses("fedavg")


@pytest.mark.slow
def test_every_method_of_the_recipes_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = [load(name) for name in names()]
    every = {recipe.config(row, column).method for recipe in recipes for row, column in recipe.cells()}
    assert losses("greg(alpha=10.0)")[0] is None  # it diverges in the end
    monkeypatch.setattr(probes, "ROUNDS", 2)  # of which the second is from the middle of a run on
    kinds = {
        re.sub(r"=[\d.e-]+", "=", method): method for method in sorted(every)
    }  # one of those that differ in a number
    assert len(kinds) > 50
    assert [method for method in kinds.values() if losses(method)[0] is None] == []
