"""Who asks for messages is answered when there is one, and need not ask again and again.

Flower's sites ask every three seconds, and in a round over a network nobody does anything meanwhile. Here a question
for which there is no message yet is kept for some seconds, and put to Flower again once somebody has sent something.
The server itself asks in the same way for the replies of sites.
"""

import asyncio
from asyncio import FIRST_COMPLETED
from collections.abc import Callable
from typing import Any

HELD = 8.0  # seconds: Flower's client waits for an answer for 30, and proxies rarely less than that
CLOSING = 0.2  # seconds after which it is looked whether the server goes down
LARGEST = 2**16  # bytes of a question that is worth keeping


class LongPoll:
    """In front of Flower's ASGI app, for what one side sends and the other asks for.

    Args:
        has_messages: tells an answer with a message from one without.
        held: seconds that a question is kept.
        most: questions that are kept at a time, since all of them are put again when something is sent; others are
            answered at once.
        is_closing: whether the server goes down.
    """

    def __init__(
        self,
        app: Any,
        has_messages: Callable[[bytes], bool],
        held: float = HELD,
        most: int = 10**6,
        is_closing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app, self._has_messages, self._held, self._most = app, has_messages, held, most
        self._is_closing = is_closing
        self._sent = asyncio.Event()  # another one after each time that something was
        self._kept: dict[tuple[bytes, bytes], asyncio.Event] = {}  # set once the same question has come again

    async def sent(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass on something that is sent."""
        try:
            await self._app(scope, receive, send)
        finally:
            self._sent.set()
            self._sent = asyncio.Event()

    async def asked(self, key: bytes, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer a question of whoever has this key. Of two that are the same, the first was cut off and came again: it
        gets no message, since nobody would read it."""
        body = await _body(receive)
        if body is None:
            return
        who, again = (key, body), asyncio.Event()
        if earlier := self._kept.get(who):
            earlier.set()
        self._kept[who] = again
        over = [asyncio.ensure_future(_gone(receive)), asyncio.ensure_future(again.wait())]
        try:
            answer = await self._first(scope, body, over)
        finally:
            for one in over:
                one.cancel()
            if self._kept.get(who) is again:
                del self._kept[who]
        for message in answer:
            await send(message)

    async def _first(self, scope: dict[str, Any], body: bytes, over: list[Any]) -> list[dict[str, Any]]:
        """The first answer with a message in it, or the last one before one of these is done or its time is up."""
        now = asyncio.get_running_loop().time
        until = now() + self._held if len(self._kept) <= self._most else 0.0
        while True:
            sent = asyncio.ensure_future(self._sent.wait())  # from before the question on
            answer = await self._ask(scope, body)
            while self._is_empty(answer) and not sent.done():
                if now() >= until or any(one.done() for one in over) or self._is_closing():
                    break
                await asyncio.wait({sent, *over}, timeout=min(CLOSING, until - now()), return_when=FIRST_COMPLETED)
            if not (self._is_empty(answer) and sent.done()) or any(one.done() for one in over):
                sent.cancel()
                return answer

    async def _ask(self, scope: dict[str, Any], body: bytes) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = []
        asked = False

        async def receive() -> dict[str, Any]:
            nonlocal asked
            if asked:
                await asyncio.Event().wait()  # as long as there is somebody
            asked = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: dict[str, Any]) -> None:
            answer.append(message)

        await self._app(scope, receive, send)
        return answer

    def _is_empty(self, answer: list[dict[str, Any]]) -> bool:
        status = next((message["status"] for message in answer if message["type"] == "http.response.start"), 0)
        body = b"".join(message.get("body", b"") for message in answer)
        return status == 200 and not self._has_messages(body)


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
