from __future__ import annotations

from pathlib import Path

import pytest

from fedkeel.core.state import select
from fedkeel.engine.tasks import fetched
from fedkeel.errors import MethodError
from tests import tiny
from tests.methods.by_hand import FULL, SIZES, assert_near, initial, mean, trained
from tests.methods.small import started

HEAD = ("head.weight", "head.bias")


def test_bodies_are_averaged_and_each_client_goes_on_with_its_head(tmp_path: Path) -> None:
    run = started("fedper", tmp_path, local_epochs=2, **FULL)
    body = {name: t for name, t in initial().items() if name not in HEAD}
    heads = {k: {name: initial()[name] for name in HEAD} for k in SIZES}
    for round in range(3):
        ends = {k: trained(k, body | heads[k], 2) for k in SIZES}
        heads = {k: {name: ends[k][name] for name in HEAD} for k in SIZES}
        average = mean(list(ends.values()), list(SIZES.values()))
        body = {name: average[name] for name in body}
        run.round(round)
        assert run.server.weights.keys() == body.keys()
        assert_near(run.server.weights, body)
        for k in SIZES:
            assert_near(select(fetched(run.memory.look(k)), "local"), heads[k])


def test_more_of_the_last_layers_can_stay() -> None:
    worker = tiny.setup("fedper(layers=[encoder.1, head])").worker
    assert {name.rpartition(".")[0] for name in worker.layout.local} == {"encoder.1", "head"}


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ("haed", "'fedper' is to keep 'haed' on the client: did you mean 'head'"),
        ("encoder.2", "'encoder.2' on the client"),
    ],
)
def test_a_layer_that_has_nothing_to_keep_is_refused(layers: str, sentence: str) -> None:
    with pytest.raises(MethodError, match=sentence):
        tiny.setup(f"fedper(layers={layers})")
