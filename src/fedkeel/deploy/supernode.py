"""Flower's SuperNode, which signs its requests by the server's clock and does not sleep while there is work."""

import time
from collections.abc import Callable
from typing import Any

from fedkeel.deploy import clock, flower_internals, flower_processes
from fedkeel.deploy.clock import BORNE, Differences
from fedkeel.engine.executors.flower.channel import next_look

REFUSED = (401, 412)
BETWEEN_QUESTIONS = 3.0  # seconds that Flower sleeps before it asks for messages again


class SignsByServerClock:
    """In place of Flower's own interceptor, which signs by this machine's clock: learns from every answer how far that
    is ahead of the server's, and sends a request that was refused once more if that was news."""

    def __init__(self, private: Any, public: Any, differences: Differences | None = None) -> None:
        self._private, self._public = private, public
        self._differences = differences or Differences()
        self.ahead = 0.0

    def intercept(self, context: Any, call_next: Any) -> Any:
        response, news = self._send(context, call_next)
        if news and response.status_code in REFUSED:
            response, _ = self._send(context, call_next)
        return response

    def _send(self, context: Any, call_next: Any) -> tuple[Any, bool]:
        began = flower_internals.now()
        moment = began - (self.ahead if abs(self.ahead) <= BORNE else 0.0)
        context.request.headers.update(flower_internals.signature(self._private, self._public, moment))
        context.request.headers[clock.DIFFERENCE] = f"{self.ahead:.1f}"
        response = call_next(context)
        # The server's moment lies between asking and hearing, so how far the clocks differ is known to within that.
        theirs, news = clock.number(response.headers.get(clock.CLOCK)), False
        if theirs is not None:
            least, most = began - theirs, flower_internals.now() - theirs
            news = not least <= self.ahead <= most
            self.ahead = (least + most) / 2 if news else self.ahead
        self._differences.write("server", self.ahead)
        return response, news


class Pauses:
    """In place of Flower's fixed ones: who asked for messages, and waited for the answer as long as it would have
    slept, asks again at once; for the reply of its app it looks often at first and then more seldom."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._asked = self._began = clock()

    def begin(self) -> None:
        """From now on it looks for the reply to another message."""
        self._began = self._clock()

    def sleep(self, seconds: float) -> None:
        now = self._clock()
        if seconds >= BETWEEN_QUESTIONS:
            self._sleep(max(0.0, seconds - (now - self._asked)))
            self._asked = self._clock()
            return
        self._sleep(next_look(now - self._began, seconds))


if __name__ == "__main__":
    clock.install()
    flower_processes.run_supernode(SignsByServerClock, Pauses())
