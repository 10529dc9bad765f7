"""A client that has no update to offer, and the look at one that has."""

import math

from fedkeel.core.checking import check_finite
from fedkeel.core.messages import BadMessage, Update
from fedkeel.core.state import Tensors


class ClientFailure(Exception):
    """This client has no update to offer; the text says why."""


def check_loss(loss: float) -> None:
    if not math.isfinite(loss):
        raise ClientFailure(f"its loss became {loss}: a lower learning rate may help")


def refuse_not_finite(update: Update, memory: Tensors) -> None:
    try:
        check_finite({**update.weights, **update.statistics, **memory})
    except BadMessage as bad:
        raise ClientFailure(f"{bad}: a lower learning rate may help") from None
