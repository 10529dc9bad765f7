from __future__ import annotations

from pathlib import Path

from tests import tiny


def test_one_client_holds_the_samples_of_all_and_each_domain_is_tested(tmp_path: Path) -> None:
    run = tiny.run(tmp_path / "r", "central", on=tiny.federation(unseen=4), rounds=1)
    assert [(r["client"], r["samples"]) for r in run.records("client")] == [("pooled", 14 + 9 + 21)]
    assert list(run.domains) == ["bright", "dark", "tinted", "foreign"]
    assert run.accuracy == sum(run.domains[d] for d in ("bright", "dark", "tinted")) / 3


def test_samples_of_unseen_clients_are_not_pooled() -> None:
    pooled = tiny.setup("central", on=tiny.federation(unseen=4)).federation
    stranger = pooled["stranger"]
    assert not set(stranger.test.tolist()) & set(pooled.clients[0].train.tolist())
