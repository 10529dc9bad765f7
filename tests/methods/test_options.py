"""Options of methods: what is declared is checked, on the command line and in Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedkeel.errors import FedkeelError
from fedkeel.methods import METHODS, Method
from fedkeel.methods.fedprox import FedProx
from fedkeel.methods.hbn import HBN
from fedkeel.methods.moon import Moon
from fedkeel.methods.silobn import SiloBN
from fedkeel.options import hints_of


def test_every_option_of_every_method_says_what_it_may_be() -> None:
    for entry in METHODS:
        assert hints_of(entry.build).keys() == entry.options().keys(), entry.name


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: FedProx(mu=-1), "The 'mu' of fedprox is -1: give at least 0."),
        (lambda: HBN(momentum=2), "The 'momentum' of hbn is 2: give a number above 0 and at most 1."),
        (lambda: HBN(warm_start="on"), "The 'warm_start' of hbn is 'on': give auto, true or false."),  # type: ignore[arg-type]
        (lambda: Moon(projector=0), "The 'projector' of moon is 0: give at least 1."),
        (lambda: SiloBN(unseen="bacth"), "The 'unseen' of silobn is 'bacth': did you mean 'batch'?"),  # type: ignore[arg-type]
    ],
)
def test_a_method_that_is_made_in_python_is_held_against_them_too(build: Callable[[], Method], sentence: str) -> None:
    with pytest.raises(FedkeelError) as caught:
        build()
    assert str(caught.value) == sentence
