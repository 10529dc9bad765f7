"""A site's question for messages is answered when there is one, and by nobody else's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed")

from flwr.proto.fleet_pb2 import PullMessagesResponse
from flwr.proto.message_pb2 import Message
from flwr.proto.runtime_pb2 import PullAppMessagesResponse

from fedkeel.deploy.flower_internals import PULL, PUSH, has_messages, has_replies
from fedkeel.deploy.long_poll import LongPoll
from fedkeel.deploy.supernode import Pauses
from tests.processes import HANG

NOTHING = PullMessagesResponse().SerializeToString()
ONE = PullMessagesResponse(messages_list=[Message()]).SerializeToString()
ASKS, SENDS = {"type": "http", "path": PULL}, {"type": "http", "path": PUSH}


class Flower:
    """Messages of a site are taken away once they were in an answer."""

    def __init__(self, held: float = HANG, most: int = 10) -> None:
        self.waiting: deque[bytes] = deque()
        self.questions: list[bytes] = []
        self.looking: asyncio.Event | None = None  # until then
        self.closing = False
        self.poll = LongPoll(self, has_messages, held, most, is_closing=lambda: self.closing)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope is SENDS:
            self.waiting.append(ONE)
            return
        self.questions.append((await receive())["body"])
        body = self.waiting.popleft() if self.waiting else NOTHING
        if self.looking is not None:
            await self.looking.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def asked(self, count: int) -> None:
        while len(self.questions) < count:
            await asyncio.sleep(0)


class Site:
    def __init__(self, flower: Flower, body: bytes = b"node 7") -> None:
        self.there, self._body, self._flower = asyncio.Event(), body, flower
        self._read = False

    async def receive(self) -> dict[str, Any]:
        if not self._read:
            self._read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.there.wait()
        return {"type": "http.disconnect"}

    async def ask(self, key: bytes = b"key") -> bytes:
        parts: list[bytes] = []

        async def send(message: dict[str, Any]) -> None:
            parts.append(message.get("body", b""))

        await self._flower.poll.asked(key, ASKS, self.receive, send)
        return b"".join(parts)


async def nothing() -> dict[str, Any]:
    raise AssertionError("nobody reads the server's own request here")


def run(act: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(act(), HANG))


def test_an_answer_with_messages_is_told_from_one_without() -> None:
    assert has_messages(ONE)
    assert not has_messages(NOTHING)
    assert has_replies(PullAppMessagesResponse(messages_list=[Message()]).SerializeToString())
    assert not has_replies(PullAppMessagesResponse().SerializeToString())


def test_a_message_that_is_there_is_told_at_once() -> None:
    async def act() -> None:
        flower = Flower()
        flower.waiting.append(ONE)
        assert await Site(flower).ask() == ONE
        assert flower.questions == [b"node 7"]

    run(act)


def test_a_question_is_kept_until_the_server_sends_something() -> None:
    async def act() -> None:
        flower = Flower()
        question = asyncio.ensure_future(Site(flower).ask())
        await flower.asked(1)
        assert not question.done()
        await flower.poll.sent(SENDS, nothing, nothing)
        assert await question == ONE
        assert flower.questions == [b"node 7"] * 2

    run(act)


def test_a_message_that_comes_while_it_is_looked_for_is_not_overlooked() -> None:
    async def act() -> None:
        flower = Flower()
        flower.looking = asyncio.Event()
        question = asyncio.ensure_future(Site(flower).ask())
        await flower.asked(1)
        await flower.poll.sent(SENDS, nothing, nothing)  # the answer to the question is on its way, without it
        flower.looking.set()
        assert await question == ONE

    run(act)


def test_a_server_that_goes_down_answers_at_once() -> None:
    async def act() -> None:
        flower = Flower()
        question = asyncio.ensure_future(Site(flower).ask())
        await flower.asked(1)
        flower.closing = True
        assert await question == NOTHING

    run(act)


def test_a_question_is_not_kept_for_ever() -> None:
    async def act() -> None:
        assert await Site(Flower(held=0.0)).ask() == NOTHING

    run(act)


def test_of_many_questions_only_so_many_are_kept() -> None:
    async def act() -> None:
        flower = Flower(most=2)
        kept = [asyncio.ensure_future(Site(flower, name).ask()) for name in (b"node 1", b"node 2")]
        await flower.asked(2)
        assert await Site(flower, b"node 3").ask() == NOTHING
        assert not any(question.done() for question in kept)
        flower.waiting.append(ONE)
        await flower.poll.sent(SENDS, nothing, nothing)
        assert [await question for question in kept] == [ONE, ONE]

    run(act)


def test_a_site_that_asks_again_has_the_answer_and_its_first_question_none() -> None:
    async def act() -> None:
        flower = Flower()
        first = asyncio.ensure_future(Site(flower).ask())
        await flower.asked(1)
        second = asyncio.ensure_future(Site(flower).ask())
        await flower.asked(2)
        assert await first == NOTHING
        await flower.poll.sent(SENDS, nothing, nothing)
        assert await second == ONE

    run(act)


def test_other_sites_and_other_keys_are_not_the_same_question() -> None:
    async def act() -> None:
        flower = Flower()
        asked = [(Site(flower), b"key"), (Site(flower, b"node 8"), b"key"), (Site(flower), b"other key")]
        questions = [asyncio.ensure_future(site.ask(key)) for site, key in asked]
        await flower.asked(3)
        flower.waiting.extend([ONE, ONE])
        await flower.poll.sent(SENDS, nothing, nothing)
        assert [await question for question in questions] == [ONE] * 3

    run(act)


def test_a_message_is_not_given_to_a_site_that_is_gone() -> None:
    async def act() -> None:
        flower = Flower()
        site = Site(flower)
        question = asyncio.ensure_future(site.ask())
        await flower.asked(1)
        site.there.set()
        assert await question == NOTHING
        await flower.poll.sent(SENDS, nothing, nothing)
        assert flower.questions == [b"node 7"]
        assert await Site(flower).ask() == ONE

    run(act)


class Time:
    def __init__(self) -> None:
        self.now, self.slept = 100.0, list[float]()

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_a_site_whose_question_was_kept_asks_again_at_once() -> None:
    time = Time()
    pauses = Pauses(time.clock, time.sleep)
    time.now += 8.0
    pauses.sleep(3)
    assert time.slept == [0.0]


def test_a_site_whose_questions_are_answered_at_once_asks_as_seldom_as_ever() -> None:
    time = Time()
    pauses = Pauses(time.clock, time.sleep)
    for _ in range(5):
        pauses.sleep(3)
    assert time.now == 115.0


def test_looking_for_a_reply_is_late_by_a_twentieth_and_never_by_more_than_flower_is() -> None:
    time = Time()
    pauses = Pauses(time.clock, time.sleep)
    while time.now < 200.0:
        waited = time.now - 100.0
        pauses.sleep(0.5)
        assert time.slept[-1] <= min(0.5, 0.02 + waited / 20 + 1e-9)
    assert time.slept[-1] == 0.5
    pauses.begin()  # another message has come
    pauses.sleep(0.5)
    assert time.slept[-1] == 0.02
