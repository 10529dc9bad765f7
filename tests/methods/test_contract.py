"""What every method must stand: other executors, interruption, other parts beside it, clients that share a GPU's slot,
and options that are not what they should be."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fedkeel.core.composition import Composition
from fedkeel.errors import FedkeelError, MethodError
from fedkeel.methods import METHODS, build
from fedkeel.options import hints_of
from tests import tiny
from tests.methods.together import VARIANTS, assert_a_slot_serves_all, assert_executors_agree, assert_it_resumes

# What acts from a later round on by default acts from the first one here.
SOON = {"fedfm": "fedfm(from_round=0)", "fixbn": "fixbn(freeze_from=0.5)"}
ALL = [SOON.get(name, name) for name in METHODS.names()]
EMPTY = ("fedavg", "central")  # the mean of the clients, or one of them: beside another they change nothing


@pytest.mark.slow
@pytest.mark.parametrize("method", [*ALL, *VARIANTS])
def test_executors_agree(method: str, tmp_path: Path) -> None:
    assert_executors_agree(tmp_path, method)


@pytest.mark.slow
@pytest.mark.parametrize("method", [*ALL, *VARIANTS])
def test_a_resumed_run_is_the_run_that_was_not_stopped(method: str, tmp_path: Path) -> None:
    assert_it_resumes(tmp_path, method)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["greg", "hbn"])
@pytest.mark.parametrize("method", [name for name in ALL if name not in (*EMPTY, "greg", "hbn")])
def test_it_acts_beside_another_part_or_is_refused(method: str, other: str, tmp_path: Path) -> None:
    alone = tiny.result(tiny.run(tmp_path / "alone", other))
    for text in (f"{method}+{other}", f"{other}+{method}"):
        try:
            both = tiny.run(tmp_path / text, text)
        except MethodError:
            continue
        assert math.isfinite(both.accuracy)
        assert tiny.result(both) != alone, text


@pytest.mark.parametrize("method", [*ALL, *VARIANTS])
def test_a_step_that_is_captured_asks_nothing_and_serves_all_clients(method: str) -> None:
    setup = tiny.setup(build(method))
    if Composition.of(setup.worker.method).uncapturable:
        pytest.skip("its clients train one after another")
    if method.startswith("fedrdn"):
        pytest.skip("the answers to its question come first: see its own tests")
    assert_a_slot_serves_all(setup.worker, tiny.broadcast(setup.worker), {name: {} for name in tiny.SIZES})


def test_every_option_of_every_method_refuses_what_it_is_not() -> None:
    for entry in METHODS:
        hints = hints_of(entry.build)
        for option in (option for option in entry.options() if "Sequence" not in str(hints[option])):
            with pytest.raises(FedkeelError, match=f"'{option}' of {entry.name} is"):
                METHODS.make(entry.name, **{option: [math.nan]})
