"""Who takes part in a round, and in how many steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedkeel.config import Config
from fedkeel.errors import FedkeelError
from fedkeel.trust.rules import PlainGradients, UniformSampler
from tests import tiny


@pytest.mark.parametrize("drop_last", [False, True])
def test_local_steps_are_the_first_of_as_many_passes_as_it_takes(drop_last: bool) -> None:
    whole = Config(local_epochs=4, batch_size=8, drop_last=drop_last)
    order, sizes, uniforms = PlainGradients(whole).batches("ward", 3, 21, 2)
    for steps in (1, 2, 3, 7, len(sizes)):
        config = whole.replace(local_epochs=1, local_steps=steps)
        first, own, noise = PlainGradients(config).batches("ward", 3, 21, 2)
        assert own == sizes[:steps]
        assert first.tolist() == order[: sum(own)].tolist()
        assert noise.shape == (len(first), 2)
        assert (noise == uniforms[: len(first)]).all()


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedrep", "scaffold"])
def test_steps_of_whole_passes_are_these_passes(method: str, tmp_path: Path) -> None:
    on = tiny.federation({"ward": 12, "clinic": 12})
    passes = tiny.run(tmp_path / "passes", method, on=on, local_epochs=2)
    steps = tiny.run(tmp_path / "steps", method, on=on, local_steps=6)
    assert tiny.result(passes) == tiny.result(steps)
    fewer = tiny.run(tmp_path / "fewer", method, on=on, local_steps=2)
    assert tiny.result(fewer) != tiny.result(steps)


def test_a_number_of_clients_is_the_share_that_comes_to_as_many() -> None:
    for number in (1, 4, 10):
        by_share, by_number = Config(participation=number / 10), Config(clients_per_round=number)
        for round in range(3):
            drawn = UniformSampler(by_number).sample(10, round)
            assert drawn == UniformSampler(by_share).sample(10, round)
            assert len(drawn) == number
    assert len(UniformSampler(Config(clients_per_round=99)).sample(10, 0)) == 10


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"local_steps": 3, "local_epochs": 2}, "'local_steps' does nothing beside --local-epochs"),
        ({"clients_per_round": 2, "participation": 0.5}, "'clients_per_round' does nothing beside --participation"),
        ({"clients_per_round": 2, "dp": "central"}, "'clients_per_round' does nothing .*with --dp central"),
        ({"clients_per_round": 2, "method": "central"}, "'clients_per_round' does nothing .*one client of all"),
    ],
)
def test_one_way_at_a_time(options: dict[str, object], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(FedkeelError, match=sentence):
        tiny.run(tmp_path / "run", **options)  # type: ignore[arg-type]
