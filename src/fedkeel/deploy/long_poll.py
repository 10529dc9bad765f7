"""A site that asks for messages is answered when there is one, and need not ask again and again.

Flower's sites ask every three seconds, and in a round over a network nobody does anything meanwhile. Here a question
for which there is no message yet is kept for some seconds, and put to Flower again once the server has sent something:
all of it, since a site that finds a message whose pieces are still to come waits for a second before it looks again.
"""

import asyncio
from typing import Any

from fedkeel.deploy.flower_internals import has_messages

HELD = 8.0  # seconds: Flower's client waits for an answer for 30, and proxies rarely less than that
QUIET = 0.03  # seconds after the last piece that the server sent
LARGEST = 2**16  # bytes of a question that is worth keeping


class LongPoll:
    """In front of Flower's ASGI app, for what the server sends and for what sites ask."""

    def __init__(self, app: Any, held: float = HELD) -> None:
        self._app, self._held = app, held
        self._sending, self._last = 0, 0.0
        self._sent = asyncio.Event()  # another one after each time that something was
        self._questions: dict[
            tuple[bytes, bytes], asyncio.Event
        ] = {}  # set for one that another has taken the place of

    async def server_sends(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self._sending += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._sending -= 1
            self._last = asyncio.get_running_loop().time()
            self._sent.set()
            self._sent = asyncio.Event()

    async def site_asks(self, key: bytes, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Flower's answer to a site; of two questions of the same site, which was cut off and came again, the first one
        gets no message, since nobody would read it."""
        body = await _body(receive)
        if body is None:
            return
        who, replaced = (key, body), asyncio.Event()
        if earlier := self._questions.get(who):
            earlier.set()
        self._questions[who] = replaced
        until = asyncio.get_running_loop().time() + self._held
        over = [asyncio.ensure_future(_gone(receive)), asyncio.ensure_future(replaced.wait())]
        try:
            while True:
                sent = self._sent
                await self._complete(until)
                answer = await self._ask(scope, body)
                left = until - asyncio.get_running_loop().time()
                if left <= 0 or not _is_empty(answer):
                    break
                news = asyncio.ensure_future(sent.wait())
                await asyncio.wait({news, *over}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if any(one.done() for one in over):
                    break
        finally:
            for one in over:
                one.cancel()
            if self._questions.get(who) is replaced:
                del self._questions[who]
        for message in answer:
            await send(message)

    async def _complete(self, until: float) -> None:
        """Wait for the end of what the server is sending."""
        now = asyncio.get_running_loop().time
        while now() < until and (self._sending or now() < self._last + QUIET):
            await asyncio.sleep(QUIET)

    async def _ask(self, scope: dict[str, Any], body: bytes) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = []
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if asked:
                await asyncio.Event().wait()  # as long as the site is there
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            answer.append(message)

        await self._app(scope, receive, send)
        return answer


async def _body(receive: Any) -> bytes | None:
    """All of a question; None for whoever is gone before its end, or asks for pages."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] != "http.request" or len(body) > LARGEST:
            return None
        if not message.get("more_body", False):
            return bytes(body)


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _is_empty(answer: list[dict[str, Any]]) -> bool:
    status = next((message["status"] for message in answer if message["type"] == "http.response.start"), 0)
    body = b"".join(message.get("body", b"") for message in answer)
    return status == 200 and not has_messages(body)
