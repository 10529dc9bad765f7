"""A signature changes with what a method computes, and with nothing else."""

import pytest
import torch
from torch import Tensor

from fedkeel.core.client import Batch, LocalClient
from fedkeel.core.types import Output
from fedkeel.experiments.recipes import load, names
from fedkeel.experiments.signature import same, signature
from fedkeel.methods.fedprox import FedProx
from fedkeel.stopping import stop_requested


def test_a_method_is_told_from_another_and_known_again() -> None:
    first = signature("fedprox(mu=0.01)")
    signature.cache_clear()
    assert signature("fedprox(mu=0.01)") == first
    assert not same(first, signature("fedprox(mu=0.011)"))
    assert not same(first, first[:-1])


def test_what_a_method_computes_is_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signature("fedprox(mu=0.5)")
    signature.cache_clear()
    loss = FedProx.loss

    def a_little_more(self: FedProx, client: LocalClient, batch: Batch, output: Output) -> Tensor | float:
        return 1.01 * loss(self, client, batch, output)

    monkeypatch.setattr(FedProx, "loss", a_little_more)
    assert not same(before, signature("fedprox(mu=0.5)"))
    signature.cache_clear()


def test_it_leaves_everything_as_it_was() -> None:
    before = signature("fedavg")
    signature.cache_clear()
    threads = torch.get_num_threads()
    stop_requested.set()  # runs are being stopped: no reason to stop here, nor to forget about it
    try:
        assert signature("fedavg") == before
        assert stop_requested.is_set()
    finally:
        stop_requested.clear()
    assert torch.get_default_dtype() is torch.float32
    assert torch.get_num_threads() == threads


def test_a_loss_that_is_no_number_is_equal_to_one_that_is_none_either() -> None:
    assert same((1.0, None), (1.0, None))
    assert not same((1.0, None), (1.0, 2.0))
    assert not same((), ())


def test_a_method_that_the_small_problem_does_not_suit_has_one_all_the_same() -> None:
    assert signature("fedwon(skip=encoder.conv9)") == (None,)


@pytest.mark.slow
def test_every_method_of_the_recipes_has_one() -> None:
    recipes = [load(name) for name in names()]
    every = {recipe.config(row, column).method for recipe in recipes for row, column in recipe.cells()}
    lengths = {method: len(signature(method)) for method in sorted(every)}
    assert {method: n for method, n in lengths.items() if n != 8} == {}
