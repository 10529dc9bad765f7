"""What a run says of itself while it trains, and what is left of that when it ends."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

import fedkeel
from fedkeel.deploy import serving
from fedkeel.errors import FedkeelError
from fedkeel.runs import live
from fedkeel.stopping import Stopped, stop_requested
from tests import tiny
from tests.deploy.loop import over_network


class Looking(tiny.Notes):
    """Reads the file at every event, as one who watches could."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory, self.seen = directory, list[tuple[Any, ...]]()

    def client_done(self, round: int, done: int, total: int) -> None:
        self._look()

    def aggregated(self, state: Any) -> None:
        self._look()

    def _look(self) -> None:
        found = live.read(self.directory)
        assert live.is_running(found)
        self.seen.append((found["round"], found["done"], found["clients"]))


def test_while_it_trains_the_file_says_how_many_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "BURST", 3600.0)  # every event is written, however slow the disk
    looking = Looking(tmp_path / "run")
    tiny.run(tmp_path / "run", rounds=2, observer=looking)
    assert looking.seen == [(round, done, 3) for round in (0, 1) for done in (1, 2, 3, 3)]


def test_a_finished_run_has_ended_and_its_notes_are_kept(tmp_path: Path) -> None:
    notes = tiny.Notes()
    run = tiny.run(tmp_path / "run", observer=notes)
    found = live.read(run.directory)
    assert (found["ended"], found["done"], found["round"]) == ("", 0, 3)
    assert [note["text"] for note in found["notes"]] == notes.remarks
    assert not live.is_running(found)


def test_one_that_was_stopped_says_so_and_keeps_its_notes_when_it_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with pytest.raises(Stopped):
        tiny.run(directory, rounds=3, observer=tiny.Notes(lambda _: stop_requested.set()))
    stop_requested.clear()
    assert live.read(directory)["ended"] == live.STOPPED
    before = live.Live(directory, tiny.Notes())
    before.note("something is odd")
    tiny.resume(directory, observer=tiny.Notes())
    assert live.read(directory)["notes"][0]["text"] == "something is odd"


def test_the_reason_of_an_error_is_there_to_be_read(tmp_path: Path) -> None:
    class Failing(fedkeel.Observer):
        def round_done(self, *_: Any) -> None:
            raise FedkeelError("The sky fell.")

    with pytest.raises(FedkeelError):
        tiny.run(tmp_path / "run", observer=Failing())
    assert live.read(tmp_path / "run")["ended"] == "The sky fell."


def test_what_happens_often_is_written_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "BURST", -3600.0)
    watched = live.Live(tmp_path, tiny.Notes())
    watched.client_done(0, 1, 3)
    assert live.read(tmp_path)["done"] == 0
    watched.note("but what is noted is there at once")
    assert live.read(tmp_path)["done"] == 1


def test_whether_a_process_is_at_it(tmp_path: Path) -> None:
    live.Live(tmp_path, tiny.Notes())
    found = live.read(tmp_path)
    assert live.is_running(found)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert not live.is_running({**found, "pid": child})
    assert live.is_running({**found, "pid": child, "host": f"not-{socket.gethostname()}"}), "nobody can know"
    assert not live.is_running({})


@pytest.mark.parametrize("text", ["", "[]", "7", '{"pid": 1', '{"pid": "x", "notes": []}', '{"notes": [{"at": null}]}'])
def test_a_file_that_is_none_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / live.FILE).write_text(text)
    assert live.read(tmp_path) == {}


def test_a_directory_that_cannot_be_written_costs_no_run(tmp_path: Path) -> None:
    heard = tiny.Notes()
    live.Live(tmp_path / "nowhere", heard).note("still told")
    assert heard.notes == ["still told"]


def test_the_records_of_a_round_can_be_read_when_it_is_over(tmp_path: Path) -> None:
    """Not only after the next checkpoint."""
    read: list[int] = []

    def look(_: int) -> None:
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        read.append(sum(json.loads(line)["kind"] == "round" for line in lines))

    tiny.run(tmp_path / "run", rounds=3, checkpoint_every=3, observer=tiny.Notes(look))
    assert read == [1, 2, 3]


def test_who_no_longer_waits_for_sites_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def enrol(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(serving, "enrol", enrol)
    with pytest.raises(KeyboardInterrupt):
        over_network(tmp_path)
    assert live.read(tmp_path / "run")["ended"] == live.STOPPED
