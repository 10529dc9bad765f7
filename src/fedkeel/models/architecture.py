"""What may be said of a thing by whoever names it: plain words and numbers.

A configuration may be a stranger's, or come over a network. What it says of a model must not name a file or an
address, nor ask for more than a machine holds.
"""

import re
from collections.abc import Mapping
from typing import Any

from fedkeel.errors import FedkeelError

WORD = re.compile(r"[A-Za-z0-9_+-]{0,40}")
MOST_VALUES = 16  # of a list


def refuse_strange(of: str, options: Mapping[str, Any], largest: float = 1e6) -> None:
    """Refuse an option that is no plain value: a number of at most `largest`, a word, yes or no, or a short list."""
    for name, value in options.items():
        if not is_plain(value, largest):
            raise FedkeelError(
                f"The option '{name}' of '{of}' is not plain: give a word of at most 40 letters, digits and _+-, a "
                f"number of at most {largest:g}, true or false, or a list of at most {MOST_VALUES} of these."
            )


def is_plain(value: object, largest: float) -> bool:
    if isinstance(value, list | tuple):
        return len(value) <= MOST_VALUES and all(is_plain(entry, largest) for entry in value)
    if isinstance(value, str):
        return WORD.fullmatch(value) is not None
    return value is None or (isinstance(value, int | float) and abs(value) <= largest)  # a NaN is not
