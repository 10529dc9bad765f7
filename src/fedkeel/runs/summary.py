"""Whether a `summary.json` is one that a run wrote: somebody may have been at it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

RULES = {
    "last": "the last round",
    "mean-last-10": "the mean of the last ten rounds",
    "best-validation": "the round that was best on the validation data",
}
SOURCES = {  # of the noise of private runs, the weakest first
    "seed": "noise from the run's seed, void against whoever knows it",
    "secret": "noise from a secret",
    "sites": "noise from a secret at each site",
}


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_share(value: object) -> bool:
    return _is_number(value) and 0 <= value <= 1 + 1e-9  # type: ignore[operator]


RESULTS: dict[str, Callable[[Any], bool]] = {
    "accuracy": _is_share,
    "domains": lambda value: isinstance(value, dict) and all(map(_is_share, value.values())),
    "result": lambda value: isinstance(value, str) and value in RULES,
}
SUMMARY: dict[str, Callable[[Any], bool]] = {
    **RESULTS,
    "samples_accuracy": _is_share,
    "unseen": lambda value: value is None or _is_share(value),
    "unseen_domains": _are_names,
    **dict.fromkeys(("bytes_up", "bytes_down", "seconds"), _is_number),
    "executor": lambda value: isinstance(value, str),
}
IF_THERE: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("rounds", "questions", "epsilon", "delta"), _is_number),
    **dict.fromkeys(("untested_domains", "diverged_domains"), _are_names),
    "randomness": lambda value: isinstance(value, str) and value in SOURCES,
}


def unsound(summary: Mapping[str, Any], *, whole: bool = True) -> str:
    """What of it cannot be shown, or nothing. `whole`: everything that is shown of a run, or its results alone."""
    needed = SUMMARY if whole else RESULTS
    for name, is_sound in {**SUMMARY, **IF_THERE}.items():
        if name not in summary and name in needed:
            return f"'{name}' is missing"
        if name in summary and not is_sound(summary[name]):
            return f"'{name}' is {str(summary[name])[:80]!r}"
    return ""


def weakest(private: Iterable[Mapping[str, Any]]) -> str | None:
    """What the noise of these rounds or runs rests on: the run's seed, if it does in one of them."""
    found = {str(given.get("randomness", "seed")) for given in private}
    return next((source for source in SOURCES if source in found), "seed") if found else None
