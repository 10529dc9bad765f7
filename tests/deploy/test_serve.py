"""A server that is refused at its start is as if it had not been started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from fedkeel.config import Config
from fedkeel.deploy import deployment
from fedkeel.deploy.addresses import free_port
from fedkeel.deploy.deployment import ProcessEnded, ServerOptions, serve
from fedkeel.errors import FedkeelError


def refuse(monkeypatch: pytest.MonkeyPatch, out: Path, error: Exception, *, begun: bool = False) -> None:
    """Serve with a federation that ends like this after Flower has left its files."""

    def fail(_config: Any, out: Path, *_: Any) -> None:
        (out / "flower" / "superlink.log").write_text("what Flower says")
        if begun:
            (out / "config.toml").write_text("")
        raise error

    monkeypatch.setattr(deployment, "_serve", fail)
    with pytest.raises(type(error)):
        serve(Config(data="folder(size=16)"), out, ServerOptions(None, port=free_port(), sites=2))


def test_what_is_refused_before_a_run_begins_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, tmp_path / "runs/fed", FedkeelError("No site can take part: see to one and start again."))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs/fed").mkdir(parents=True)
    (tmp_path / "runs/fed/notes.txt").write_text("somebody else's")
    refuse(monkeypatch, tmp_path / "runs/fed", FedkeelError("No site can take part: see to one and start again."))
    assert [path.name for path in (tmp_path / "runs/fed").iterdir()] == ["notes.txt"]


def test_the_log_of_flower_stays_where_a_sentence_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, tmp_path / "fed", ProcessEnded("Flower's superlink ended: see its log."))
    assert (tmp_path / "fed/flower/superlink.log").exists()


def test_what_a_run_has_begun_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, tmp_path / "fed", FedkeelError("'min_clients' is 3."), begun=True)
    assert (tmp_path / "fed/flower/superlink.log").exists()
