"""Sites get what sites need, with a key of theirs; the rest is for who knows the server's secret."""

from __future__ import annotations

import asyncio
import datetime
from base64 import b64encode
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

import httpx
from flwr.proto.control_pb2 import ListNodesRequest
from flwr.supercore.control.control_http_client import ControlHttpClient
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message

from fedkeel.deploy import flower_internals
from fedkeel.deploy.clock import Differences
from fedkeel.deploy.connections import SECRET, ConnectionGuard, password
from fedkeel.deploy.flower_internals import Endpoint
from fedkeel.deploy.quota import LARGEST, UNDER_WAY
from fedkeel.deploy.superlink import RequestGuard, shorten
from tests.deploy.served import Served

PUSH = "/v1/fleet/push-object"
WORD = password(b"secret")
NOW = 1_800_000_000.0


@pytest.fixture(autouse=True)
def clock_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_internals, "now", lambda: NOW)


class Flower:
    """What is behind the middleware; it answers 200, and waits for `go` before that where there is one."""

    def __init__(self, keys: tuple[bytes, ...] | None = None) -> None:
        self.read = 0
        self.go: asyncio.Event | None = None
        state = SimpleNamespace(get_node_id_by_public_key=lambda key: 7 if key in (keys or ()) else None)
        factory = SimpleNamespace(state=lambda: state)
        self.state = SimpleNamespace(enable_supernode_auth=keys is not None, linkstate_factory=factory)
        self.told: dict[str, float] = {}
        differences = Differences(Path("/nowhere/clocks.json"))
        differences.write = self.told.__setitem__  # type: ignore[method-assign]
        self.guard = RequestGuard(self, b"secret", ConnectionGuard(), differences, held=0)

    async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:
        self.read += 1
        if self.go is not None:
            await self.go.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def answer(self, path: str, client: str | None, **headers: str) -> int:
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        scope: dict[str, Any] = {"type": "http", "path": path, "client": (client, 4711) if client else None}
        scope["headers"] = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        await self.guard(scope, receive, send)
        return int(sent[0]["status"])


def status(path: str, client: str | None, **headers: str) -> int:
    """What a request gets where there are no keys; 200 is the app behind the middleware."""
    return asyncio.run(Flower().answer(path, client, **headers))


OWN = ["/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/", "/v1/fleetx/", "/v1/fleet"]


@pytest.mark.parametrize("path", OWN)
@pytest.mark.parametrize("client", ["127.0.0.1", "::1", "10.0.0.7", "not an address", None])
def test_wherever_it_comes_from_only_the_secret_opens_more_than_the_fleet_api(path: str, client: str | None) -> None:
    assert status(path, client) == 403
    assert status(path, client, x_forwarded_for="127.0.0.1", forwarded="for=127.0.0.1") == 403
    for wrong in ("", "secret", WORD[:-1], WORD + "0", password(b"another")):
        assert status(path, client, fedkeel_secret=wrong) == 403
    assert status(path, client, fedkeel_secret=WORD) == 200
    assert status("/v1/fleet/pull-messages", client) == 200


def test_fedkeels_own_requests_are_let_in_and_those_of_other_users_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a socket, as Flower's client sends them, where uvicorn is told to believe what proxies say."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")
    for name in ("http_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # what stays on this machine does not go by it
    clients: list[Any] = []

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        clients.append(scope["client"][0])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    with Served(app) as served:
        for secret, wanted in ((b"secret", 200), (b"another", 403)):
            client = Endpoint(f"127.0.0.1:{served.port}", None, secret).client(ControlHttpClient, retry=False)
            if wanted == 200:
                client.ListNodes(ListNodesRequest())
            else:
                with pytest.raises(httpx.HTTPStatusError, match="403"):
                    client.ListNodes(ListNodesRequest())
            client.close()
        url = f"http://127.0.0.1:{served.port}/v1/control/list-nodes"
        with httpx.Client(trust_env=False) as stranger:
            assert stranger.post(url).status_code == 403
            assert stranger.post(url, headers={"X-Forwarded-For": "127.0.0.1"}).status_code == 403
            assert stranger.post(url, headers={"X-Forwarded-For": "10.9.9.9", SECRET: WORD}).status_code == 200
    assert clients == ["127.0.0.1"] * 2, "where a request comes from is where its connection comes from"


def test_a_request_larger_than_any_of_a_site_is_refused_before_it_is_read() -> None:
    assert status(PUSH, "10.0.0.7", content_length=str(6 * 2**20)) == 200
    assert status(PUSH, "10.0.0.7", content_length=str(17 * 2**20)) == 413
    assert status(PUSH, "127.0.0.1", content_length=str(10**12)) == 413
    assert status(PUSH, "10.0.0.7", content_length="-1") == 413
    assert status(PUSH, "10.0.0.7", transfer_encoding="chunked") == 413, "it does not say how large it is"


def test_a_long_log_begins_anew_and_is_written_on(tmp_path: Path) -> None:
    path = tmp_path / "superlink.log"
    with open(path, "ab", buffering=0) as log:
        log.write(b"x" * 100)
        shorten(log.fileno(), 100)
        assert path.stat().st_size == 100
        log.write(b"one more\n")
        shorten(log.fileno(), 100)
        log.write(b"and on\n")
    assert path.read_bytes() == b"and on\n"


def signed(pair: Any, ahead: float = 0, **changes: str) -> dict[str, str]:
    """The headers of a node's request, by a clock that is so far ahead of the server's."""
    private, public = pair
    moment = datetime.datetime.fromtimestamp(NOW + ahead, datetime.timezone.utc).isoformat()
    return {
        "flwr_public_key": b64encode(public_key_to_bytes(public)).decode(),
        "flwr_signature": b64encode(sign_message(private, moment.encode())).decode(),
        "flwr_timestamp": moment,
        **changes,
    }


def test_who_has_no_key_of_a_site_is_not_even_read() -> None:
    site, thief = generate_key_pairs(), generate_key_pairs()
    link = Flower((public_key_to_bytes(site[1]),))

    def asked(path: str, **headers: str) -> int:
        return asyncio.run(link.answer(path, "10.0.0.7", **headers))

    assert asked(PUSH) == 401
    assert asked(PUSH, **signed(thief)) == 401
    assert asked(PUSH, **{**signed(thief), "flwr_public_key": signed(site)["flwr_public_key"]}) == 401
    assert asked(PUSH, **signed(site, flwr_timestamp="2026-02-02T00:00:00+00:00")) == 401
    assert asked(PUSH, **signed(site, flwr_signature="%%%")) == 401
    assert asked(PUSH, **signed(site, ahead=-306)) == 401, "somebody may have seen it since"
    assert asked(PUSH, **signed(site, ahead=6)) == 401
    assert asked(PUSH, **signed(site, flwr_timestamp="soon")) == 401
    assert asked("/v1/fleet/activate-node", **signed(thief)) == 412, "then Flower's SuperNode ends, and is started anew"
    assert link.read == 0
    assert asked(PUSH, **signed(site)) == 200


def test_a_site_cannot_fill_the_memory_with_requests_that_never_end() -> None:
    pairs = [generate_key_pairs(), generate_key_pairs()]
    link = Flower(tuple(public_key_to_bytes(public) for _, public in pairs))
    most = UNDER_WAY // LARGEST

    async def flood() -> tuple[int, int, list[int], int]:
        link.go = asyncio.Event()

        async def ask(pair: Any) -> int:
            return await link.answer(PUSH, "10.0.0.7", **signed(pair, content_length=str(LARGEST)))

        held = [asyncio.create_task(ask(pairs[0])) for _ in range(most)]
        while link.read < most:
            await asyncio.sleep(0.01)
        more = await ask(pairs[0])
        other = asyncio.create_task(ask(pairs[1]))
        while link.read < most + 1:
            await asyncio.sleep(0.01)
        link.go.set()
        return more, await other, list(await asyncio.gather(*held)), await ask(pairs[0])

    more, other, held, later = asyncio.run(flood())
    assert more == 503
    assert other == 200, "another site is not touched"
    assert held == [200] * most
    assert later == 200


def test_the_server_learns_how_far_off_the_clock_of_a_site_is() -> None:
    site, thief = generate_key_pairs(), generate_key_pairs()
    link = Flower((public_key_to_bytes(site[1]),))

    def told(pair: Any, ahead: float = 0, **headers: str) -> dict[str, float]:
        link.told.clear()
        asyncio.run(link.answer(PUSH, "10.0.0.7", **signed(pair, ahead, **headers)))
        return dict(link.told)

    assert told(site, fedkeel_clock_difference="-400.5") == {"7": -400.5}, "which it has made up for"
    assert told(site, ahead=-4000) == {"7": -4000}, "more than it makes up for"
    assert told(site, ahead=8, fedkeel_clock_difference="0.0") == {"7": 8}, "which it does not know of yet"
    for odd in ("nan", "inf", "1e300", "x", ""):
        assert told(site, fedkeel_clock_difference=odd) == {"7": 0}
    assert told(thief, fedkeel_clock_difference="-400.5") == {}
