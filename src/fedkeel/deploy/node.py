"""Flower's SuperNode, which signs its requests by the server's clock."""

from __future__ import annotations

import datetime
from base64 import b64encode
from typing import Any

from flwr.common.constant import TIMESTAMP_HEADER
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supernode import fleet_http_connection

from fedkeel.deploy import clock
from fedkeel.deploy.clock import Differences, ServerTime

REFUSED = (401, 412)


class ByTheServersClock:
    """In place of Flower's own interceptor, which signs by this machine's clock: learns from every answer what the
    server's says, and sends a request that was refused once more if that was news."""

    def __init__(
        self, private: Any, public: Any, time: ServerTime | None = None, differences: Differences | None = None
    ) -> None:
        self._private, self._public = private, public_key_to_bytes(public)
        self._time, self._differences = time or ServerTime(), differences or Differences.given()

    def intercept(self, context: Any, call_next: Any) -> Any:
        response, news = self._signed(context, call_next)
        if news and response.status_code in REFUSED:
            response, _ = self._signed(context, call_next)
        return response

    def _signed(self, context: Any, call_next: Any) -> tuple[Any, bool]:
        moment = datetime.datetime.fromtimestamp(self._time.now(), datetime.timezone.utc).isoformat()
        signature = sign_message(self._private, moment.encode())
        context.request.headers[FLEET_HTTP_PUBLIC_KEY_HEADER] = b64encode(self._public).decode()
        context.request.headers[TIMESTAMP_HEADER] = moment
        context.request.headers[FLEET_HTTP_SIGNATURE_HEADER] = b64encode(signature).decode()
        context.request.headers[clock.DIFFERENCE] = f"{self._time.ahead:.1f}"
        heard = self._time.ask()
        response = call_next(context)
        news = heard(response.headers.get(clock.CLOCK))
        self._differences.write("server", self._time.ahead)
        return response, news


def main() -> None:
    from flwr.supernode.cli import flower_supernode

    clock.install_given()
    connection: Any = fleet_http_connection
    connection.NodeAuthHttpInterceptor = ByTheServersClock
    flower_supernode()


if __name__ == "__main__":
    main()
