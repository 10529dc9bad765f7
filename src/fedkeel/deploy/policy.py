"""What a site lets a server ask of it: `fedkeel join --accept policy.toml`.

A server is a stranger. What it names (method, network, sizes, rounds) is held against the site's policy before
anything is read or built, with every message anew. The fields below are the only list of what a policy can say: the
file format, the checks and the printed default are made from them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from fedkeel.config import read_table
from fedkeel.core.naming import visible
from fedkeel.errors import FedkeelError, nearest
from fedkeel.methods import METHODS
from fedkeel.models.encoder import MODELS
from fedkeel.models.timm_models import PREFIX
from fedkeel.options import Count, Needs, NotNegative, Range, check_fields, idle

DEFAULT = "the default policy"
STRENGTH = ("none", "central", "local")


class Refused(FedkeelError):
    """What a server asked for and this site does not do.

    The text is for the server; `line` says, for the site's own log, which line of its policy is behind it.
    """

    def __init__(self, reason: str, line: str = "") -> None:
        super().__init__(visible(reason[:400]))
        self.line = line


def line(default: Any, help: str, needs: Needs | None = None) -> Any:
    return field(default=default, metadata={"help": help, "needs": needs})


ANY = ("*",)
LOCAL = Needs(lambda policy: policy.dp == "local", "without 'dp = \"local\"'")
LIMITED = Needs(lambda policy: policy.epsilon, "without a limit on 'epsilon'")


@dataclass(frozen=True)
class Policy:
    """The most that a site does for a server. The defaults let every method and network of a usual size through."""

    methods: tuple[str, ...] = line(ANY, "methods; all parts of a composition must be among them, '*' is any")
    models: tuple[str, ...] = line(ANY, "networks: Fedkeel's own, such as 'resnet18', or timm's, such as 'timm:vit_*'")
    parameters: Count = line(200_000_000, "most numbers in a network, counted before it is built")
    image_size: Count = line(1024, "most pixels on a side of an image")
    samples: Count = line(1, "fewest images that a run may train on, or test on: one alone would show")
    rounds: Count = line(10_000, "most rounds of a run")
    questions: bool = line(True, "answer what methods ask beside the training: statistics, gradients, class means")
    evaluation: bool = line(True, "tell accuracy and loss on the test and validation images")
    by_class: bool = line(True, "tell the same by class: how many test images of each are taken for each other")
    dp: Literal["none", "central", "local"] = line(
        "none", "differential privacy, at least: 'local' does not rely on the server, 'central' does"
    )
    epsilon: NotNegative = line(
        0.0, 'with dp = "local", most that all runs together may spend here; 0 is no limit', needs=LOCAL
    )
    delta: Annotated[float, Range(above=0, most=0.5)] = line(1e-5, "at which epsilon is counted", needs=LIMITED)
    source: str = field(default=DEFAULT, compare=False)
    numbers: dict[str, int] = field(default_factory=dict, compare=False)  # of the lines that a file has

    def __post_init__(self) -> None:
        for name in KNOWN:
            object.__setattr__(self, name, _names(name, getattr(self, name)))
        check_fields(self)
        for sentence in idle(self, self).values():
            raise FedkeelError(sentence)

    @staticmethod
    def read(path: Path) -> Policy:
        """From a TOML file; what it does not say is as in the default policy."""
        table, numbers = read_table(path, "policy")
        names = [entry.name for entry in options()]
        for name in table:
            if name not in names:
                raise FedkeelError(f"There is no '{name}' in a policy: {nearest(name, names)}")
        return Policy(**table, source=path.name, numbers=numbers)

    def to_toml(self) -> str:
        lines = ["# What a site of Fedkeel accepts: 'fedkeel join HOST --data DIR --accept THIS'.", ""]
        lines += [f"{self.text(entry.name)}  # {entry.metadata['help']}" for entry in options()]
        return "\n".join(lines) + "\n"

    def text(self, name: str) -> str:
        return f"{name} = {json.dumps(getattr(self, name), ensure_ascii=False)}"

    # -- refusals ---------------------------------------------------------------------------------------------
    def refusal(self, name: str, asked: str) -> Refused:
        number = f", line {self.numbers[name]}" if name in self.numbers else ""
        return Refused(f"{asked}, and its policy has '{self.text(name)}'", f"{self.source}{number}: {self.text(name)}")

    def at_most(self, name: str, asked: float, what: str) -> None:
        if not asked <= getattr(self, name):  # nor is what is not a number
            raise self.refusal(name, f"{asked:,} {what}" if isinstance(asked, int) else f"{asked:.3g} {what}")

    def at_least(self, name: str, asked: float, what: str) -> None:
        if asked < getattr(self, name):
            raise self.refusal(name, f"{asked:,} {what}")

    def one_of(self, name: str, asked: str, what: str) -> None:
        if not any(fnmatchcase(asked, pattern) for pattern in getattr(self, name)):
            raise self.refusal(name, f"the {what} '{asked}'")

    def allows(self, name: str, what: str) -> None:
        if not getattr(self, name):
            raise self.refusal(name, what)

    def strong_enough(self, dp: str) -> None:
        if STRENGTH.index(dp) < STRENGTH.index(self.dp):
            raise self.refusal("dp", f"'dp = \"{dp}\"'")


KNOWN = {"methods": METHODS.names, "models": MODELS.names}


def options() -> list[dataclasses.Field[Any]]:
    return [entry for entry in fields(Policy) if "help" in entry.metadata]


def _names(option: str, given: object) -> tuple[str, ...]:
    """Names or patterns; a name that nothing has is a mistake that would shut a site out silently."""
    listed: Sequence[object] = [given] if isinstance(given, str) else given if isinstance(given, list | tuple) else [0]
    for name in listed:
        if not isinstance(name, str):
            raise FedkeelError(f"'{option}' in the policy is {given!r}: give a list of names, such as [\"*\"].")
        known = KNOWN[option]()
        if not any(fnmatchcase(one, name) for one in known) and not (option == "models" and name.startswith(PREFIX)):
            raise FedkeelError(f"'{option}' in the policy has '{name}', which is none: {nearest(name, known)}")
    return tuple(str(name) for name in listed)
