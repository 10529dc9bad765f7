"""A client that has no update to offer, and the look at one that has."""

import math
from collections.abc import Sequence

from fedkeel.core.checking import check_finite, examined
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


def look(update: Update, memory: Tensors, numbers: Sequence[float]) -> Update:
    """The update as one that was looked at, by these numbers of `glance`. What is not finite is refused, also of what a
    client remembers, which would spoil its next rounds too; whatever else is wrong, the server says."""
    seen = examined(update, numbers)
    if seen is update:
        refuse_not_finite(update, memory)
    return seen
