"""Options of methods: what is declared is checked, on the command line and in Python."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fedkeel.errors import FedkeelError
from fedkeel.methods import Method, build
from fedkeel.methods.fedprox import FedProx
from fedkeel.methods.hbn import HBN
from fedkeel.methods.moon import Moon
from fedkeel.methods.silobn import SiloBN


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: FedProx(mu=-1), "The 'mu' of fedprox is -1: give at least 0."),
        (lambda: HBN(momentum=2), "The 'momentum' of hbn is 2: give a number above 0 and at most 1."),
        (lambda: HBN(warm_start="on"), "The 'warm_start' of hbn is 'on': give auto, true or false."),  # type: ignore[arg-type]
        (lambda: Moon(mu=-1), "The 'mu' of moon is -1: give at least 0."),
        (lambda: SiloBN(unseen="bacth"), "The 'unseen' of silobn is 'bacth': did you mean 'batch'?"),  # type: ignore[arg-type]
    ],
)
def test_a_method_that_is_made_in_python_is_held_against_them_too(build: Callable[[], Method], sentence: str) -> None:
    with pytest.raises(FedkeelError) as caught:
        build()
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("text", "sentence", "remedy"),
    [
        ("greg(lambda_=0.3)", "The 'lambda_' of greg does nothing with mode=consistency: give mode=mix,", "mode=mix"),
        ("greg(alpha=2, mode=global)", "The 'alpha' of greg does nothing with mode=global", "mode=consistency"),
        ("hbn(stats_samples=8, statistics=moving-average)", "give statistics=pass, or leave it", "statistics=pass"),
        ("hbn(stats_samples=8, variant=released)", "does nothing with variant=released", "variant=paper"),
        ("fedcoda(clip_norm=3)", "The 'clip_norm' of fedcoda does nothing with clip=adaptive", "clip=fixed"),
        ("fedcoda(beta=0.5, clip=none)", "does nothing with clip=none", "clip=adaptive"),
        ("fedcoda(clip=fixed, calibrate_bn=false)", "with calibrate_bn=false: give", "calibrate_bn=true"),
        ("fedwon(clipping=0.64, agc=false)", "does nothing with agc=false: give agc=true", "agc=auto"),
        ("fedwon(gain=1.71, standardise=false)", "does nothing with standardise=false", "standardise=true"),
    ],
)
def test_one_that_does_nothing_beside_another_is_refused(text: str, sentence: str, remedy: str) -> None:
    with pytest.raises(FedkeelError) as caught:
        build(text)
    assert sentence in str(caught.value)
    first, name = text.partition(",")[0].rstrip(")"), remedy.partition("=")[0]
    build(f"{first}, {remedy})")
    build(f"{first.partition('(')[0]}({remedy})")  # which needs none of the others
    assert name in str(caught.value)
