"""What a site lets a server ask of it: `fedkeel join --accept policy.toml`.

A server is a stranger. What it names is held against the site's policy with every message anew. The fields below are
the only list of what a policy can say: the file, the checks and the printed default are made from them.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from fedkeel.config import read_table
from fedkeel.core.naming import visible
from fedkeel.errors import FedkeelError, nearest
from fedkeel.methods import METHODS
from fedkeel.models.encoder import MODELS
from fedkeel.models.timm_models import PREFIX
from fedkeel.options import Count, Needs, NotNegative, check_fields, idle

STRENGTH = ("none", "central", "local")
DELTA = 1e-5  # at which a site counts epsilon


class Refused(FedkeelError):
    """What a server asked for and this site does not do."""

    def __init__(self, reason: str) -> None:
        super().__init__(visible(reason[:400]))


def line(default: Any, help: str, needs: Needs | None = None) -> Any:
    return field(default=default, metadata={"help": help, "needs": needs})


LOCAL = Needs(lambda policy: policy.dp == "local", "without 'dp = \"local\"'")


@dataclass(frozen=True)
class Policy:
    """The most that a site does for a server. The defaults let every method and network of a usual size through."""

    methods: tuple[str, ...] = line(("*",), "every part of a composition must be among them, '*' is any")
    models: tuple[str, ...] = line(
        ("*",), "networks: Fedkeel's own, such as 'resnet18', or timm's, such as 'timm:vit_*'"
    )
    parameters: Count = line(200_000_000, "most numbers in a network, counted before it is built")
    samples: Count = line(1, "fewest images that a run may train on, or test on: one alone would show")
    rounds: Count = line(10_000, "most rounds of a run")
    evaluation: bool = line(True, "tell accuracy and loss on the test and validation images")
    by_class: bool = line(True, "tell the same by class: how many test images of each are taken for each other")
    dp: Literal["none", "central", "local"] = line(
        "none", "differential privacy, at least: 'local' does not rely on the server, 'central' does"
    )
    epsilon: NotNegative = line(
        0.0, f'with dp = "local", most that all runs together may spend here at delta = {DELTA:g}; 0 is no limit', LOCAL
    )

    def __post_init__(self) -> None:
        for name, known in (("methods", METHODS.names()), ("models", MODELS.names())):
            given = getattr(self, name)
            listed = (given,) if isinstance(given, str) else given
            if not isinstance(listed, list | tuple) or not all(isinstance(one, str) for one in listed):
                raise FedkeelError(f"'{name}' in the policy is {given!r}: give a list of names, such as [\"*\"].")
            for one in listed:  # a name that nothing has is a mistake that would shut a site out silently
                if not any(fnmatchcase(entry, one) for entry in known) and not one.startswith(PREFIX):
                    raise FedkeelError(f"'{name}' in the policy has '{one}', which is none: {nearest(one, known)}")
            object.__setattr__(self, name, tuple(listed))
        check_fields(self)
        for sentence in idle(self, self).values():
            raise FedkeelError(sentence)

    @staticmethod
    def read(path: Path) -> Policy:
        """From a TOML file; what it does not say is as in the default policy."""
        table, _ = read_table(path, "policy")
        names = [entry.name for entry in options()]
        for name in table:
            if name not in names:
                raise FedkeelError(f"There is no '{name}' in a policy: {nearest(name, names)}")
        return Policy(**table)

    def to_toml(self) -> str:
        lines = ["# What a site of Fedkeel accepts: 'fedkeel join KIT --data DIR --accept THIS'.", ""]
        lines += [f"{self.text(entry.name)}  # {entry.metadata['help']}" for entry in options()]
        return "\n".join(lines) + "\n"

    def text(self, name: str) -> str:
        return f"{name} = {json.dumps(getattr(self, name), ensure_ascii=False)}"

    def require(self, name: str, fits: bool, asked: str) -> None:
        """Refuse what was asked for unless it fits this line."""
        if not fits:
            raise Refused(f"{asked}, and its policy has '{self.text(name)}'")

    def one_of(self, name: str, asked: str) -> None:
        fits = any(fnmatchcase(asked, pattern) for pattern in getattr(self, name))
        self.require(name, fits, f"the {name.removesuffix('s')} '{asked}'")

    def strong_enough(self, dp: str) -> None:
        self.require("dp", STRENGTH.index(dp) >= STRENGTH.index(self.dp), f"'dp = \"{dp}\"'")


def options() -> list[dataclasses.Field[Any]]:
    return [entry for entry in fields(Policy) if "help" in entry.metadata]
