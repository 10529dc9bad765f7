"""What is told of runs while they train, and the server that tells it: to this machine, and nothing of its files."""

from __future__ import annotations

import html
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedkeel.cli import main
from fedkeel.errors import FedkeelError
from fedkeel.report import moment, watch
from fedkeel.report.moment import look
from fedkeel.runs import live
from tests import tiny
from tests.deploy.loop import Loop, over_network, sites_of
from tests.report.samples import make_comparison, make_run

Ask = Callable[..., http.client.HTTPResponse]


def begin(directory: Path, **state: Any) -> live.Live:
    """As if this process were at the run in the directory."""
    running = live.Live(directory, tiny.Notes())
    running.set(**state)
    return running


def add_timing(directory: Path, rounds: int, seconds: float) -> None:
    lines = ({"round": r, "train": seconds, "aggregate": 0.0, "evaluate": 0.0, "clients": {}} for r in range(rounds))
    (directory / "timing.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


# -- what is told ------------------------------------------------------------------------------------------------------
def test_a_run_that_trains_is_in_its_next_round_and_says_how_far_it_is_and_how_long(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=8, done=4)
    add_timing(run, 4, 10.0)
    begin(run, round=4, done=1, clients=2).note("Something is odd.")
    document, (group,) = look(run)
    (row,) = document["runs"]
    assert (document["state"], row["round"], row["rounds"], row["clients"]) == ("running", 5, 8, [1, 2])
    assert document["left"] == pytest.approx(35.0)  # three and a half rounds
    assert document["share"] == pytest.approx(4.5 / 8)
    assert [note["text"] for note in document["notes"]] == ["Something is odd."]
    assert group.labels == ["fedavg"]


def test_records_that_are_ahead_of_what_is_said_to_be_done_count(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=8, done=6)
    begin(run, round=4, done=1, clients=2)
    document, _ = look(run)
    assert (document["runs"][0]["round"], document["share"]) == (7, 6 / 8)


def test_stopped_and_finished_runs_are_told_apart(tmp_path: Path) -> None:
    stopped, finished = make_run(tmp_path / "a", done=3), make_run(tmp_path / "b")
    begin(stopped).end("The disk is full.")
    document, _ = look(stopped)
    (row,) = document["runs"]
    assert (document["state"], row["round"], row["reason"]) == ("stopped", 3, "The disk is full.")
    assert row["continue"] == f"fedkeel resume {stopped}"
    document, _ = look(finished)
    assert (document["state"], document["share"], document["left"]) == ("finished", 1.0, None)


def test_of_a_comparison_the_runs_to_come_count(tmp_path: Path) -> None:
    place = make_comparison(tmp_path / "c", ("fedavg", "fedbn"), seeds=1, rounds=8)
    comparison = json.loads((place / "comparison.json").read_text())
    comparison["runs"] += [{"method": "gn", "seed": 0, "directory": "row2/seed0"}]
    (place / "comparison.json").write_text(json.dumps(comparison))
    (place / "row1/seed0/summary.json").unlink()
    half = make_run(tmp_path / "half", "fedbn", done=4) / "metrics.jsonl"
    half.replace(place / "row1/seed0/metrics.jsonl")
    add_timing(place / "row0/seed0", 8, 10.0)
    add_timing(place / "row1/seed0", 8, 10.0)
    begin(place / "row1/seed0", round=4)
    document, _ = look(place)
    assert [row["state"] for row in document["runs"]] == ["finished", "running", "waiting"]
    assert (document["left"], document["share"]) == (pytest.approx(40 + 80), pytest.approx(0.5))


def test_a_place_where_nothing_has_begun_is_waited_at(tmp_path: Path) -> None:
    assert look(tmp_path)[0]["state"] == "waiting"
    make_run(tmp_path / "run", done=1)
    assert look(tmp_path)[0]["runs"][0]["run"] == "fedavg, seed 0"


def test_what_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make_comparison(tmp_path / "c", ("fedavg", "fedbn"), seeds=1)
    read: list[Path] = []
    real = moment.read_member
    monkeypatch.setattr(moment, "read_member", lambda of, run, n: (read.append(run.directory), real(of, run, n))[1])
    for _ in range(3):
        look(place)
    assert len(read) == 2
    add_timing(place / "row1/seed0", 1, 1.0)
    look(place)
    assert read[2:] == [place / "row1/seed0"]


def test_sites_are_told_with_what_they_do(tmp_path: Path) -> None:
    run = over_network(tmp_path, loop=Loop(sites_of(tiny.federation(), tmp_path / "sites", tiny.model())), rounds=2)
    document, _ = look(run.directory)
    clinic = document["sites"]["clinic"]
    assert sorted(document["sites"]) == ["clinic", "hospital", "ward"]
    assert (clinic["connected"], clinic["state"]) == (True, "round 2: evaluate, done")
    assert "clinic" in watch.status(document)


# -- the server --------------------------------------------------------------------------------------------------------
@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Ask]:
    """Asks the server of a run for a path."""
    run = make_run(tmp_path / "run", "fedprox(note='<script>alert(1)</script>')", done=2)
    with watch.Server(run, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()

        def asked(path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
            connection = http.client.HTTPConnection(*server.server_address[:2], timeout=60)
            connection.request(method, path, headers=headers)
            return connection.getresponse()

        yield asked
        server.shutdown()
        thread.join()


def test_it_has_the_page_the_numbers_and_the_report(ask: Ask) -> None:
    page = ask("/").read().decode()
    assert "connect-src 'self'" in html.unescape(page)
    state = json.loads(ask("/state.json").read())
    assert state["problem"] == ""
    assert "stopped" in state["status"]
    assert "Curves so far" in state["parts"]
    assert state["figures"]
    assert "figures" not in json.loads(ask(f"/state.json?{state['drawn']}").read()), "those are known"
    report = ask("/report.html").read().decode()
    assert "fedprox" in report
    for text in (page, state["status"], state["parts"], report):
        assert "<script>alert(1)" not in text


@pytest.mark.parametrize(
    "path", ["/metrics.jsonl", "/config.toml", "/../config.toml", "/%2e%2e/config.toml", "//etc", ""]
)
def test_it_hands_out_no_file(ask: Ask, path: str) -> None:
    assert ask(path or "/index.html").status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_can_only_be_read(ask: Ask, method: str) -> None:
    assert ask("/state.json", method).status == 501


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8350", "127.0.0.1.evil.example", "localhost:1:2", "", ":80"]
)
def test_who_calls_it_by_another_name_gets_nothing(ask: Ask, host: str) -> None:
    answer = ask("/state.json", Host=host)
    assert answer.status == 403
    assert b"fedprox" not in answer.read()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9000", "[::1]:8350", "[::1]"])
def test_this_machine_has_several_names_and_through_a_tunnel_any_port(ask: Ask, host: str) -> None:
    assert ask("/state.json", Host=host).status == 200


def test_no_other_page_may_read_or_frame_it(ask: Ask) -> None:
    headers = ask("/state.json").headers
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Access-Control-Allow-Origin"] is None


def test_it_listens_on_this_machine_alone(tmp_path: Path) -> None:
    with watch.Server(tmp_path, 0) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "error", [FedkeelError("It is damaged."), FileNotFoundError(2, "No such file", "metrics.jsonl")]
)
def test_what_cannot_be_read_is_a_sentence_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def damaged(_: Path) -> Any:
        raise error

    with watch.Server(make_run(tmp_path / "run", done=2), 0) as server:
        monkeypatch.setattr(watch, "look", damaged)
        _, body = server.answer("/state.json") or ("", "")
    assert json.loads(body)["problem"] == str(error)


def test_many_who_ask_make_it_look_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: clock[0])
    with watch.Server(make_run(tmp_path / "run", done=2), 0) as server:
        first = server.answer("/state.json")
        make_run(tmp_path / "run" / "more", "fedbn", done=1)
        assert server.answer("/state.json") == first
        clock[0] += 2 * watch.SOONEST
        assert server.answer("/state.json") != first


# -- the command -------------------------------------------------------------------------------------------------------
def test_one_moment_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", done=2)
    assert main(["watch", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["directory"], document["runs"][0]["round"]) == (str(run), 2)


def test_wrong_inputs_are_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        cases = [
            ([str(tmp_path / "nowhere")], "holds no run"),
            ([str(tmp_path / "other")], "holds no run"),
            ([str(make_run(tmp_path / "run")), "--port", port], f"The port {port} cannot be had"),
            ([str(tmp_path / "run"), "--port", "70000"], "The port 70000 cannot be had"),
            ([str(tmp_path / "run"), "--port", "http"], "give a whole number"),
        ]
        for words, said in cases:
            assert main(["watch", *words]) == 2
            error = capsys.readouterr().err
            assert said in error
            assert error.count("\n") == 1


def test_ctrl_c_ends_it_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: watch.Server) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.Server, "serve_forever", interrupted)
    assert main(["watch", str(tmp_path), "--no-browser"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"Watching {tmp_path} at http://127.0.0.1:")
    assert said.err.strip().count("\n") == 0
    assert "no longer watching" in said.err


def test_a_port_that_is_taken_is_no_hindrance_where_none_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watch.Server(tmp_path, 0) as first:
        monkeypatch.setattr(watch, "PORT", first.server_address[1])
        with watch.Server(tmp_path) as second:
            assert second.address != first.address
        with pytest.raises(FedkeelError, match="cannot be had"):
            watch.Server(tmp_path, first.server_address[1])
