"""Flower's SuperNode, which signs its requests by the server's clock."""

from typing import Any

from fedkeel.deploy import clock
from fedkeel.deploy.clock import Differences, ServerTime
from fedkeel.deploy.flower_internals import run_supernode, signature

REFUSED = (401, 412)


class SignsByServerClock:
    """In place of Flower's own interceptor, which signs by this machine's clock: learns from every answer what the
    server's says, and sends a request that was refused once more if that was news."""

    def __init__(
        self, private: Any, public: Any, time: ServerTime | None = None, differences: Differences | None = None
    ) -> None:
        self._private, self._public = private, public
        self._time, self._differences = time or ServerTime(), differences or Differences.given()

    def intercept(self, context: Any, call_next: Any) -> Any:
        response, news = self._send(context, call_next)
        if news and response.status_code in REFUSED:
            response, _ = self._send(context, call_next)
        return response

    def _send(self, context: Any, call_next: Any) -> tuple[Any, bool]:
        context.request.headers.update(signature(self._private, self._public, self._time.now()))
        context.request.headers[clock.DIFFERENCE] = f"{self._time.ahead:.1f}"
        began = self._time.own()
        response = call_next(context)
        news = self._time.learn(began, response.headers.get(clock.CLOCK))
        self._differences.write("server", self._time.ahead)
        return response, news


if __name__ == "__main__":
    clock.install_given()
    run_supernode(SignsByServerClock)
