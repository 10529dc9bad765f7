"""How large things may be that come from outside."""

from __future__ import annotations

LARGEST = 16 * 2**20  # bytes of one request: Flower cuts what is larger than 5 MiB into pieces
UNDER_WAY = 4 * LARGEST  # of the requests of one site that are not answered yet; Flower sends two pieces at a time
TIMES, ROOM = 8, 4 * 2**20
PIECES = 64
LONGEST_NAME = 200
MOST_CLASSES = 2**15
MOST_SAMPLES = 2**40
LARGEST_IMAGE = 2**26  # numbers: 3 x 4,700 x 4,700
LARGEST_LOSS = 1e15  # of a sample; a sum of such is still a number
LONGEST_LOG = 32 * 2**20


def largest_reply(sent: int) -> int:
    """Bytes that a reply may have: an update is as large as the broadcast it answers, with a method's extras."""
    return TIMES * sent + ROOM


def most_pieces(sent: int) -> int:
    """Into how many pieces such a reply may be cut."""
    return PIECES + largest_reply(sent) // 2**20
