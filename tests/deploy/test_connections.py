"""Who says nothing is sent away, who waits for an answer is not, and strangers cannot take a site's place."""

from __future__ import annotations

import asyncio
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="uvicorn, which comes with flwr, is not installed")

from fedkeel.deploy.connections import BODY, HEADERS, ConnectionGuard, raise_descriptor_limit
from tests.deploy.served import Served, is_closed, request, status_of


class App:
    """Reads a request whole, then answers when it may."""

    def __init__(self) -> None:
        self.may, self.reading = threading.Event(), threading.Event()
        self.may.set()
        self.asked, self.reads = 0, True

    async def __call__(self, _scope: Any, receive: Any, send: Any) -> None:
        self.asked += 1
        self.reading.set()
        while self.reads and (await receive()).get("more_body"):
            pass
        while not self.may.is_set():
            await asyncio.sleep(0.005)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def served(app: App) -> Iterator[Served]:
    with Served(app) as server:
        yield server


@pytest.mark.parametrize("said", [b"", b"POST /v1/fleet/x HT", request()[:-2]], ids=["nothing", "a word", "almost all"])
def test_who_does_not_ask_in_time_is_sent_away(served: Served, app: App, said: bytes) -> None:
    guest = served.connect()
    guest.sendall(said)
    assert served.timers.seconds == [HEADERS]
    served.timers.pass_()
    assert is_closed(guest)
    assert app.asked == 0


def test_who_trickles_gains_no_time(served: Served) -> None:
    guest = served.connect()
    (timer,) = served.timers.pending
    for letter in b"POST /v1/fleet/x HTTP/1.1\r\nHost: here\r\nX-Long: ":
        guest.sendall(bytes([letter]))
    assert served.timers.pending == {timer}
    served.timers.pass_()
    assert is_closed(guest)


@pytest.mark.parametrize("reads", [True, False])
def test_who_waits_for_an_answer_is_not_hurried(served: Served, app: App, reads: bool) -> None:
    app.may.clear()
    app.reads = reads
    guest = served.connect()
    guest.sendall(request())
    served.until(lambda: app.asked == 1)
    served.until(lambda: not served.timers.pending)
    served.timers.pass_()
    app.may.set()
    assert status_of(guest) == 200


def test_after_an_answer_the_next_request_has_to_come_in_time(served: Served) -> None:
    guest = served.connect()
    for _ in range(2):
        guest.sendall(request())
        assert status_of(guest) == 200
        served.until(lambda: served.timers.seconds == [HEADERS])
    guest.sendall(b"POST /v1")
    served.timers.pass_()
    assert is_closed(guest)


def test_a_body_has_to_go_on(served: Served, app: App) -> None:
    guest = served.connect()
    guest.sendall(request(body=10) + b"abc")
    assert app.reading.wait(60)
    served.until(lambda: served.timers.seconds == [BODY])
    guest.sendall(b"defghij")
    assert status_of(guest) == 200
    guest.sendall(request(body=10) + b"abc")
    served.until(lambda: app.asked == 2 and served.timers.seconds == [BODY])
    served.timers.pass_()
    assert is_closed(guest)


def test_strangers_make_room_where_most_of_them_are(app: App) -> None:
    with Served(app, strangers=4) as served:
        site = served.connect(source="127.0.0.2")
        idle = [served.connect() for _ in range(20)]
        assert all(is_closed(guest) for guest in idle[:-3])
        for guest in (site, *idle[-3:]):
            guest.sendall(request())
            assert status_of(guest) == 200


def test_who_has_shown_a_key_does_not_make_room_for_strangers() -> None:
    import socket

    guard = ConnectionGuard(strangers=2, of_a_site=2, call_later=lambda _seconds, _act: None)
    pairs = [socket.socketpair() for _ in range(8)]
    try:
        for port, (end, _) in enumerate(pairs[:2]):
            guard.connected(end, ("10.0.0.1", port))
            guard.authenticated(("10.0.0.1", port), b"key")
        for port, (end, _) in enumerate(pairs[2:7], start=2):
            guard.connected(end, ("10.0.0.1", port))
        assert sorted(port for _, port in guard._open) == [0, 1, 5, 6]
        guard.connected(pairs[7][0], ("10.0.0.9", 7))
        guard.authenticated(("10.0.0.9", 7), b"key")
        assert 7 in {port for _, port in guard._open}
        assert 0 not in {port for _, port in guard._open}, "a site has only so many, and the first of them goes"
        assert is_closed(pairs[0][1])
    finally:
        for pair in pairs:
            for end in pair:
                end.close()


def test_over_tls_the_handshake_counts(app: App, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from fedkeel.deploy.certificates import ServerFiles, make

    make(tmp_path, ["north"], ["localhost", "127.0.0.1"])
    files = ServerFiles.of(tmp_path / "server")
    with Served(app, files=files) as served:
        silent = served.connect()
        assert served.timers.seconds == [HEADERS], "it does not even begin with TLS"
        served.timers.pass_()
        assert is_closed(silent)
        site = served.connect(ca=files.ca)
        site.sendall(request())
        assert status_of(site) == 200
        served.until(lambda: served.timers.seconds == [HEADERS])
        served.timers.pass_()
        assert is_closed(site)


def test_a_process_takes_as_many_descriptors_as_it_may() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = min(soft, 512) if soft != resource.RLIM_INFINITY else 512
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        raise_descriptor_limit()
        now = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert now == (2**16 if hard == resource.RLIM_INFINITY else min(hard, 2**16))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
