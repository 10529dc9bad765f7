"""What a person should know of a run's tests: who has nothing to be tested on, and where the model has diverged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fedkeel.config import from_one
from fedkeel.core.evaluation import Evaluation, diverged_domains
from fedkeel.data.federation import Federation
from fedkeel.engine.evaluation import split_indices

if TYPE_CHECKING:
    from fedkeel.engine.setup import Setup


@dataclass
class Remarks:
    """Notes that are made once of a domain, not in every round."""

    note: Callable[[str], None]
    _made: set[tuple[str, str]] = field(default_factory=set)

    def of_lacking(self, setup: Setup) -> None:
        lacking = [name for name in setup.domains if name in domains_without(setup.federation, "test")]
        if new := self._new("no test images", lacking):
            self.note(f"{_have(new)} no test images: that accuracy is not known, and averages are over the others.")
        if setup.config.result == "best-validation":
            asked = [name for name in setup.domains if name not in setup.held_out]
            lacking = [name for name in asked if name in domains_without(setup.federation, "validation")]
            if new := self._new("no validation images", lacking):
                self.note(f"{_have(new)} no validation images: the others say which round was best.")

    def of_diverged(self, round: int, evaluations: Iterable[Evaluation]) -> None:
        if new := self._new("loss", diverged_domains(evaluations)):
            self.note(
                f"Round {from_one(round)}: the evaluated loss on {quoted(new)} is not finite, the model has diverged "
                "there: a lower learning rate may help."
            )

    def _new(self, what: str, domains: Sequence[str]) -> list[str]:
        new = [name for name in domains if (what, name) not in self._made]
        self._made |= {(what, name) for name in new}
        return new


def domains_without(federation: Federation, split: str) -> set[str]:
    """The domains of which no client has images in this split."""
    sites = list(federation.one_of_each())
    return {site.domain for site in sites} - {site.domain for site in sites if len(split_indices(site, split))}


def _have(names: Sequence[str]) -> str:
    return f"{quoted(names)} {'has' if len(names) == 1 else 'have'}"


def quoted(names: Sequence[str], most: int = 8) -> str:
    """Names for a sentence; of very many the first.

    >>> quoted(["scan", "paper"])
    "'scan', 'paper'"
    """
    rest = len(names) - most
    return ", ".join(f"'{name}'" for name in names[:most]) + (f" and {rest:,} more" if rest > 0 else "")
