"""Clocks that differ by minutes, or are set while a run goes on, keep nobody out, and both ends say so."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

import httpx
from fastapi import HTTPException
from flwr.app import Metadata, RecordDict
from flwr.app.message import make_message
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore import date
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.superlink.routers.fleet import node_auth

from fedkeel.deploy import clock, deployment, flower_internals
from fedkeel.deploy.clock import BORNE, Differences, sentence
from fedkeel.deploy.grid import reply_to
from fedkeel.deploy.supernode import SignsByServerClock
from tests.deploy.served import Served, request

PAIR = generate_key_pairs()
TRUE = 1_800_000_000.0  # the moment at which all this happens


@pytest.fixture(autouse=True)
def flowers_own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(date, "datetime", date.datetime)  # put back at the end


class Server:
    """Takes what Flower's own check takes, by a clock that is `ahead` of the true one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead, self.asked = 0.0, 0
        self.headers: list[httpx.Headers] = []
        monkeypatch.setattr(node_auth, "now", self.now)

    def now(self) -> datetime.datetime:
        return datetime.datetime.fromtimestamp(TRUE + self.ahead, datetime.timezone.utc)

    def __call__(self, context: Any) -> httpx.Response:
        self.asked += 1
        self.headers.append(httpx.Headers(context.request.headers))
        return httpx.Response(self.judge(self.headers[-1]), headers={clock.CLOCK: f"{self.now().timestamp():.3f}"})

    def judge(self, headers: httpx.Headers) -> int:
        message = ActivateNodeRequest(public_key=public_key_to_bytes(PAIR[1]))
        try:
            node_auth.authenticate_node(
                SimpleNamespace(headers=headers, state=SimpleNamespace(protobuf_request=message))  # type: ignore[arg-type]
            )
        except HTTPException as refused:
            return refused.status_code
        return 200


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


class SiteOf:
    """A site whose clock is `ahead` of the true one; it asks `server`."""

    def __init__(self, server: Server, place: Path, ahead: float) -> None:
        self.ahead, self.server, self.path = ahead, server, place / "clocks.json"
        self.signing = SignsByServerClock(*PAIR, Differences(self.path))
        self.reader = Differences(self.path)

    def ask(self) -> int:
        context = SimpleNamespace(request=httpx.Request("POST", "http://here/v1/fleet/pull-messages", content=b"x"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(flower_internals, "now", lambda: TRUE + self.ahead)
            return int(self.signing.intercept(context, self.server).status_code)


@pytest.mark.parametrize("ahead", [8.0, 60.0, 305.0, 600.0, 890.0, -4.0, -304.0, -400.0, -890.0])
def test_a_clock_that_is_minutes_off_keeps_no_site_out_and_is_told(
    server: Server, tmp_path: Path, ahead: float
) -> None:
    site = SiteOf(server, tmp_path, ahead)
    assert [site.ask(), site.ask()] == [200, 200]
    assert server.asked <= 3, "refused once at most"
    told = site.reader.news()
    assert told == ({"server": int(ahead)} if abs(ahead) > 5 else {})
    if told:
        assert float(server.headers[-1][clock.DIFFERENCE]) == pytest.approx(ahead)


@pytest.mark.parametrize("step", [-60.0, 60.0, -600.0, 600.0])
def test_when_either_clock_is_set_the_site_stays(server: Server, tmp_path: Path, step: float) -> None:
    site = SiteOf(server, tmp_path, 8)
    assert site.ask() == 200
    server.ahead += step
    assert site.ask() == 200
    site.ahead += step
    assert site.ask() == 200
    assert site.signing.ahead == pytest.approx(8)


@pytest.mark.parametrize("ahead", [-1000.0, 3600.0, 86400.0 * 365])
def test_more_than_that_is_refused_and_told_at_both_ends(server: Server, tmp_path: Path, ahead: float) -> None:
    """Else a server could have a site sign the moments of a far future."""
    site = SiteOf(server, tmp_path, ahead)
    assert site.ask() == 401
    assert site.reader.news() == {"server": int(ahead)}
    assert float(server.headers[-1][clock.DIFFERENCE]) == pytest.approx(ahead)
    signed = datetime.datetime.fromisoformat(server.headers[-1]["flwr-timestamp"]).timestamp()
    assert signed - TRUE == pytest.approx(ahead), "by its own clock"


def test_a_signature_that_was_seen_cannot_be_used_for_long(server: Server, tmp_path: Path) -> None:
    SiteOf(server, tmp_path, 600).ask()
    seen = server.headers[-1]
    assert server.judge(seen) == 200
    server.ahead += 306
    assert server.judge(seen) == 401


def test_flower_counts_on_whatever_the_clock_is_set_to(monkeypatch: pytest.MonkeyPatch) -> None:
    since_boot = [500.0]
    monkeypatch.setattr(clock, "elapsed", lambda: since_boot[0])
    monkeypatch.setattr(time, "time", lambda: TRUE)
    base = clock.install()
    assert date.now().timestamp() == TRUE
    assert date.now().tzinfo == datetime.timezone.utc
    for step in (-60, 3600, -(10**6)):
        monkeypatch.setattr(time, "time", lambda step=step: TRUE + step)
        since_boot[0] += 2
        assert flower_internals.now() == TRUE + since_boot[0] - 500
    monkeypatch.setenv(clock.BASE, str(base))
    clock.install()  # another process of the same machine
    assert flower_internals.now() == TRUE + 6


def test_what_flower_counts_by_only_goes_forward() -> None:
    assert clock.elapsed() <= clock.elapsed()


@pytest.mark.parametrize(("lag", "ahead"), [(0.0, 8.0), (30.0, 20.0), (30.0, 0.0)])
def test_a_slow_answer_is_not_taken_for_a_wrong_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lag: float, ahead: float
) -> None:
    """The server's moment may be any between asking and hearing: what is in there is not news."""
    own, asked, odd = [1000.0 + ahead], list[float](), list[str | None]()
    monkeypatch.setattr(flower_internals, "now", lambda: own[0])
    signing = SignsByServerClock(*PAIR, Differences(tmp_path / "clocks.json"))

    def answer(_: Any) -> httpx.Response:
        asked.append(own[0])
        own[0] += lag
        says = odd[0] if odd else str(asked[-1] - ahead + lag / 2)
        return httpx.Response(401, headers={} if says is None else {clock.CLOCK: says})

    def ask() -> int:
        asked.clear()
        signing.intercept(SimpleNamespace(request=httpx.Request("POST", "http://here")), answer)
        return len(asked)

    assert ask() == (1 if lag / 2 >= ahead else 2), "once more where it was news"
    assert signing.ahead == pytest.approx(0 if lag / 2 >= ahead else ahead)
    before = signing.ahead
    for nothing in (None, "nan", "soon"):
        odd[:] = [nothing]
        assert (ask(), signing.ahead) == (1, before)


def test_the_server_says_with_every_answer_what_its_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_internals, "now", lambda: 1234.5)

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    for keys, status in ((None, b"200"), ((), b"401")):
        with Served(app, keys=keys) as served:
            site = served.connect()
            site.sendall(request(connection="close"))
            answer = b""
            while piece := site.recv(4096):
                answer += piece
        head = dict(line.split(b": ", 1) for line in answer.split(b"\r\n\r\n")[0].split(b"\r\n")[1:])
        assert answer.split()[1] == status
        assert head[clock.CLOCK.encode()] == b"1234.500"


@pytest.mark.parametrize("shift", [-4000.0, 0.0, 4000.0])
def test_a_reply_lives_as_long_as_what_it_replies_to_whatever_the_clock_here(shift: float) -> None:
    made = time.time() + shift
    metadata = Metadata(1, "id", 1, 7, "", "", created_at=made, ttl=90.0, message_type="query")
    message = make_message(metadata, content=RecordDict())
    reply = reply_to(message, RecordDict())
    assert reply.metadata.ttl == 90.0
    assert reply.metadata.created_at == made


def test_what_is_told_is_told_once_and_not_for_ever(tmp_path: Path) -> None:
    writer, reader = Differences(tmp_path / "clocks.json"), Differences(tmp_path / "clocks.json")
    assert reader.news() == {}
    writer.write("7", 3.0)
    assert reader.news() == {}
    writer.write("7", 8.2)
    writer.write("9", -400.0)
    assert reader.news() == {"7": 8, "9": -400}
    assert reader.news() == {}
    for number in range(1000):
        writer.write("7", 100.0 * number)
    assert writer._known["7"] < 3000
    (tmp_path / "clocks.json").write_text("[]")
    assert reader.news() == {}


def test_the_sentences_name_the_clock_and_the_difference() -> None:
    assert sentence("The clock of 'north'", 8, "this server's") == (
        "The clock of 'north' is 8 s ahead of this server's: that is made up for, but set it right."
    )
    said = sentence("This machine's clock", -4000, "the server's")
    assert said.startswith(
        f"This machine's clock is 4,000 s behind the server's, and no more than {BORNE:g} s are borne"
    )
    assert (
        sentence("The clock of 'north'", 0, "this server's") == "The clock of 'north' agrees with this server's again."
    )


def test_a_site_tells_also_when_its_flower_process_has_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def gone() -> None:
        Differences(tmp_path / deployment.CLOCKS).write("server", -4000)
        raise deployment.ProcessEnded("it ended")

    with pytest.raises(deployment.ProcessEnded):
        deployment.telling_clock(tmp_path, gone)()
    assert "This machine's clock is 4,000 s behind the server's" in caplog.text
