"""What is told of runs while they train, and the server that tells it: to this machine, and nothing of its files."""

from __future__ import annotations

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
from fedkeel.report.moment import Watch
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
    document, (group,) = Watch(run).look()
    (row,) = document["runs"]
    assert (document["state"], row["round"], row["rounds"], row["clients"]) == ("running", 5, 8, [1, 2])
    assert document["left"] == pytest.approx(35.0)  # three and a half rounds
    assert document["share"] == pytest.approx(4.5 / 8)
    assert [note["text"] for note in document["notes"]] == ["Something is odd."]
    assert document["clients"] == {}  # nobody has given anything yet
    assert group.labels == ["fedavg"]


def test_records_that_are_ahead_of_what_is_said_to_be_done_count(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=8, done=6)
    begin(run, round=4, done=1, clients=2)
    document, _ = Watch(run).look()
    assert (document["runs"][0]["round"], document["share"]) == (7, 6 / 8)


def test_a_run_that_is_tested_is_still_in_its_round(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=8, done=4)
    begin(run, round=4, done=2, clients=2)
    assert Watch(run).look()[0]["runs"][0]["round"] == 5


def test_stopped_and_finished_runs_are_told_apart(tmp_path: Path) -> None:
    stopped, finished = make_run(tmp_path / "a", done=3), make_run(tmp_path / "b")
    begin(stopped).end("The disk is full.")
    document, _ = Watch(stopped).look()
    (row,) = document["runs"]
    assert (document["state"], row["round"], row["reason"]) == ("stopped", 3, "The disk is full.")
    assert row["continue"] == f"fedkeel resume {stopped}"
    document, _ = Watch(finished).look()
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
    document, groups = Watch(place).look()
    assert [row["state"] for row in document["runs"]] == ["finished", "running", "waiting"]
    assert document["title"] == "3 methods on digits-shift"
    assert document["left"] == pytest.approx(40 + 80)
    assert document["share"] == pytest.approx(0.5)
    assert "clients" not in document
    assert len(groups) == 1


def test_comparisons_below_a_folder_are_told_apart_and_know_of_runs_to_come(tmp_path: Path) -> None:
    make_comparison(tmp_path / "a", ("fedavg",), seeds=1)
    make_comparison(tmp_path / "b", ("fedavg",), seeds=1, data="pacs", domains=("art",))
    (tmp_path / "c").mkdir()
    to_come = {"runs": [{"method": "gn", "seed": 0, "directory": "row0/seed0"}]}
    (tmp_path / "c" / "comparison.json").write_text(json.dumps(to_come))
    document, groups = Watch(tmp_path).look()
    names = ["fedavg seed 0 (digits-shift)", "fedavg seed 0 (pacs)", "gn seed 0"]
    assert [row["run"] for row in document["runs"]] == names
    assert document["state"] != "finished"
    assert len(groups) == 2
    assert Watch(tmp_path / "c").look()[0]["state"] == "waiting"


def test_between_two_runs_a_comparison_has_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moment.time, "time", lambda: 1000.0)
    waiting, finished = {"state": "waiting"}, {"state": "finished", "ended": 990.0}
    assert moment.state_of([waiting, finished]) == "running"
    assert moment.state_of([waiting, {**finished, "ended": 900.0}]) == "stopped"
    assert moment.state_of([waiting, finished, {"state": "stopped"}]) == "stopped"
    assert moment.state_of([finished]) == "finished"
    assert moment.state_of([waiting]) == moment.state_of([]) == "waiting"


def test_a_place_where_nothing_has_begun_is_waited_at(tmp_path: Path) -> None:
    watching = Watch(tmp_path)
    assert watching.look()[0]["state"] == "waiting"
    make_run(tmp_path / "run", done=1)
    assert watching.look()[0]["title"] == "fedavg on digits-shift"


def test_what_has_not_changed_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make_comparison(tmp_path / "c", ("fedavg", "fedbn"), seeds=1)
    read: list[Path] = []
    real = moment.read_member
    monkeypatch.setattr(moment, "read_member", lambda of, run, n: (read.append(run.directory), real(of, run, n))[1])
    watching = Watch(place)
    for _ in range(3):
        watching.look()
    assert len(read) == 2
    with open(place / "row1/seed0/timing.jsonl", "a") as file:
        file.write('{"round": 0, "train": 1.0}\n')
    watching.look()
    assert read[2:] == [place / "row1/seed0"]


def test_a_line_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", done=2)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "round", "rou')
    document, (group,) = Watch(run).look()
    assert document["notes"] == []
    assert group.members[0].rounds_done == 2


def test_sites_are_told_with_what_they_do_gave_and_lost(tmp_path: Path) -> None:
    def swallow(node: int, request: dict[str, Any], reply: Any) -> Any:
        return "it is tired" if (node, request["do"], request.get("step", [9])[0]) == ("clinic", "train", 0) else reply

    loop = Loop(sites_of(tiny.federation(), tmp_path / "sites", tiny.model()))
    loop.spoil = swallow
    run = over_network(tmp_path, loop=loop, rounds=2)
    sites = Watch(run.directory).look()[0]["sites"]
    assert [*sites] == ["clinic", "hospital", "ward"]
    clinic = sites["clinic"]
    assert (clinic["connected"], clinic["state"], clinic["updates"]) == (True, "round 2: evaluate, done", 1)
    assert (clinic["dropped"], clinic["reason"]) == (1, "it is tired")


def test_who_waits_for_sites_sees_which_are_there(tmp_path: Path) -> None:
    seen: list[dict[str, bool]] = []

    class Waiting(tiny.Notes):
        def note(self, text: str) -> None:
            super().note(text)
            sites = Watch(tmp_path / "run").look()[0].get("sites", {})
            seen.append({name: site["connected"] for name, site in sites.items()})

    named = ("clinic", "hospital", "ward")
    over_network(tmp_path, rounds=1, observer=Waiting(), named=named)
    assert seen[-1] == dict.fromkeys(named, True)


def test_curves_of_a_single_method_are_by_domain_and_of_several_by_method(tmp_path: Path) -> None:
    make_run(tmp_path / "one", domains=("average", "sketch"))
    drawn = watch.drawings(Watch(tmp_path / "one").look()[1])
    first, loss = drawn["charts"]
    assert first["choices"][0] == ("Test accuracy by domain", 0)
    assert [row["name"] for row in drawn["data"][0]] == ["average", "average (a domain)", "sketch"]
    assert [name for name, _ in loss["choices"]] == ["Test loss", "Training loss"]
    make_comparison(tmp_path / "two", ("fedavg", "fedbn"))
    drawn = watch.drawings(Watch(tmp_path / "two").look()[1])
    assert drawn["charts"][0]["choices"][0] == ("Test accuracy, mean over domains", 0)
    assert [row["name"] for row in drawn["data"][0]] == ["fedavg", "fedbn"]


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
    assert "connect-src 'self'" in page
    assert "<script>alert(1)" not in page
    state = json.loads(ask("/state.json?again").read())
    assert (state["state"], state["problem"]) == ("stopped", "")
    assert json.loads(ask("/figures.json").read())["charts"]
    report = ask("/report.html").read().decode()
    assert "fedprox" in report
    assert "<script>alert(1)" not in report


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


def test_what_cannot_be_read_is_a_sentence_on_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", done=2)
    with watch.Server(run, 0) as server:
        (run / "config.toml").write_text("rounds = [")
        kind, body = server.answer("/state.json") or ("", b"")
    assert kind == "application/json"
    assert "config.toml" in json.loads(body)["problem"]


def test_a_run_that_is_moved_meanwhile_is_a_sentence_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(_: Watch) -> Any:
        raise FileNotFoundError(2, "No such file or directory", "run/seed0/metrics.jsonl")

    with watch.Server(make_run(tmp_path / "run", done=2), 0) as server:
        monkeypatch.setattr(Watch, "look", look)
        _, body = server.answer("/state.json") or ("", b"")
    assert "seed0/metrics.jsonl" in json.loads(body)["problem"]


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
            ([str(tmp_path / "nowhere")], "is no directory"),
            ([str(tmp_path / "other")], "holds no run"),
            ([str(tmp_path / "other" / "notes.txt")], "is no directory"),
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
