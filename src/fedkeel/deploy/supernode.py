"""Flower's SuperNode, which signs its requests by the server's clock."""

from typing import Any

from fedkeel.deploy import clock, flower_internals
from fedkeel.deploy.clock import BORNE, Differences

REFUSED = (401, 412)


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


if __name__ == "__main__":
    clock.install()
    flower_internals.run_supernode(SignsByServerClock)
