"""Rounds as they are counted: from 0 by programs, from 1 by people."""

from __future__ import annotations


def from_one(round: int) -> int:
    """A round for a sentence, a table or an axis. Run directories, options and the Python API count from 0.

    >>> f"Round {from_one(0)} of 10"
    'Round 1 of 10'
    """
    return round + 1
