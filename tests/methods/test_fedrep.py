from __future__ import annotations

from pathlib import Path

import pytest

from fedkeel.core.state import select
from fedkeel.engine.tasks import fetched
from tests.methods.by_hand import FULL, SIZES, assert_near, initial, mean, trained
from tests.methods.small import started
from tests.methods.test_fedper import HEAD


@pytest.mark.parametrize(("share", "first"), [(0.5, 2), (0.75, 3), (0.0, 0), (1.0, 3)])
def test_the_head_trains_first_and_then_the_body_under_it(tmp_path: Path, share: float, first: int) -> None:
    """Four steps; the body has one of them at least."""
    run = started(f"fedrep(head_share={share})", tmp_path, local_epochs=4, **FULL)
    body = {name: t for name, t in initial().items() if name not in HEAD}
    heads = {k: {name: initial()[name] for name in HEAD} for k in SIZES}
    for round in range(2):
        ends = {
            k: trained(k, body | heads[k], 4, moves=lambda step, name: (name in HEAD) == (step < first)) for k in SIZES
        }
        heads = {k: {name: ends[k][name] for name in HEAD} for k in SIZES}
        average = mean(list(ends.values()), list(SIZES.values()))
        body = {name: average[name] for name in body}
        run.round(round)
        assert_near(run.server.weights, body)
        for k in SIZES:
            assert_near(select(fetched(run.memory.look(k)), "local"), heads[k])


def test_batches_of_a_rest_count_as_steps(tmp_path: Path) -> None:
    """24, 16 and 32 images in batches of 10: three, two and four steps, of which the head has two, one and two."""
    run = started("fedrep", tmp_path, batch_size=10)
    for client, head in (("client0", 2), ("client1", 1), ("client2", 2)):
        worker = run.setup.worker
        local = worker.begin(client, run.server.broadcast(run.server.weights), {})
        assert local.views["fedrep"].scratch["left"] == head
